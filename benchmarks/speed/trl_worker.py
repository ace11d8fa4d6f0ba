"""TRL's GRPO as a contender of the speed benchmark: a step samples completions, scores them and updates once.

    VENV/bin/python benchmarks/speed/trl_worker.py --rows 256 --layers 2 --width 64 --prompt 6 --completion 4

It follows the protocol of `worker.py`: once it is warm it says so in one line, and then answers each line `go SEED` with one JSON
line: `--steps` steps, which go on training the same model. `steps` of the answer counts sampled tokens, and `step_seconds` holds
every step. To try it by hand:

    yes "go 0" | head -5 | VENV/bin/python benchmarks/speed/trl_worker.py

The model is a random Llama, its tokenizer has a word for each token, and prompts are random words. All completions have the same
length, for the end of a sequence is forbidden; TRL's log-probabilities know nothing of that and are a little off, which costs no
time. The reward counts one token. There is no leash, hence no pass of a reference, and with one update for each batch none of old
log-probabilities either. What TRL decodes, counts and logs in every step cannot be switched off.
"""

# pyright: reportMissingImports=false

import argparse
import dataclasses
import os
import random
import statistics
import tempfile
import time
from typing import Any

from worker import Channel, Result, Timer

FIRST_WORD = 2  # after padding and the end of a sequence


@dataclasses.dataclass(frozen=True)
class Steps(Result):
    """`mean_return` is the mean reward of the last step."""

    step_seconds: list[float]
    median_step_seconds: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="completions of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--mlp", type=int, default=0, help="0: 8/3 of the width")
    parser.add_argument("--vocabulary", type=int, default=16)
    parser.add_argument("--tied", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the products; weights are float32"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmups", type=int, default=5, help="steps before the first round")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    return parser.parse_args()


def serve(options: argparse.Namespace, channel: Channel) -> None:
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(FIRST_WORD, options.vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.mlp or 8 * options.width // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        tie_word_embeddings=bool(options.tied),
        max_position_embeddings=options.prompt + options.completion,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    generator = random.Random(0)
    prompts = [
        " ".join(generator.choices(words[FIRST_WORD:], k=options.prompt)) for _ in range(options.rows // options.group * 100)
    ]

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        assert all(len(ids) == options.completion for ids in completion_ids)
        return [float(ids.count(FIRST_WORD)) for ids in completion_ids]

    class Rounds(TrainerCallback):
        """Waits for the driver between rounds; a step lasts from the end of the one before to its own end."""

        def __init__(self) -> None:
            self.done, self.seconds, self.began, self.timer = 0, [], 0.0, Timer()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.done == 0:
                self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.began)
            self.done += 1
            if self.done == options.warmups:
                compile_seconds = max(self.seconds[0] - self.seconds[-1], 0.0)
                channel.ready(compile_seconds, parameters, ("trl", "transformers", "torch"))
                self.next_round()
            elif self.done > options.warmups and len(self.seconds) == options.steps:
                wall, cpu = self.timer()
                tokens = options.steps * options.rows * options.completion
                mean_reward = trainer._metrics["train"]["reward"][-1]
                channel.result(Steps(tokens, wall, cpu, mean_reward, self.seconds, statistics.median(self.seconds)))
                self.next_round()
            self.began = time.perf_counter() if not self.seconds else now

        def next_round(self) -> None:
            torch.manual_seed(channel.wait())
            self.seconds, self.timer = [], Timer()

    model = LlamaForCausalLM(config)
    parameters = model.num_parameters()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=options.dtype == "bfloat16",
                gradient_checkpointing=False,
                per_device_train_batch_size=options.rows,
                gradient_accumulation_steps=1,
                num_generations=options.group,
                num_iterations=1,
                max_completion_length=options.completion,
                generation_kwargs={"min_new_tokens": options.completion},
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                beta=0.0,
                loss_type="grpo",
                learning_rate=options.learning_rate,
                lr_scheduler_type="constant",
                max_steps=10**9,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
            ),
            callbacks=[Rounds()],
        )
        trainer.train()


if __name__ == "__main__":
    serve(arguments(), Channel())
