"""Losses, gradients and advantages of TRL's own code on small arrays, written to `tests/data/trl_losses.json`.

    python -m venv VENV && VENV/bin/pip install -r benchmarks/speed/requirements-trl.txt
    VENV/bin/python benchmarks/golden/trl_losses.py

The methods of TRL's trainers that compute a loss are called on an object that stands for the trainer: its model gives
log-probabilities that are drawn here, and the gradient is taken by those. Advantages are those of a real `GRPOTrainer`, on a
model of a few hundred parameters. `tests/ops/test_against_trl.py` compares. Arrays are `[B, T]`, as TRL has them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateUsage=false

import collections
import json
import os
import tempfile
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.rewards import get_soft_overlong_punishment

OUT = Path(__file__).resolve().parents[2] / "tests" / "data" / "trl_losses.json"
LENGTHS = [6, 4, 1, 3, 6, 2, 5, 4]  # of completions
MAX_LENGTH = 6
REWARDS = [[0.1, 0.7, 1.0, -2.0], [0.1, 0.1, 0.1, 0.1], [3.0, None, 1.0, 2.5], [5.0, 4.5, 4.0, 9.0]]  # None: not scored
GRPO_VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "cispo": dict(loss_type="cispo", epsilon_high=1.3),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.1),
    "two-sided": dict(loss_type="bnpo", delta=1.5),
    "leash": dict(loss_type="grpo", beta=0.3, use_bias_correction_kl=False),
    "weighted leash": dict(loss_type="grpo", beta=0.3, use_bias_correction_kl=True),  # its default
    "gspo with leash": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05, beta=0.3),
    "grpo with an empty completion": dict(loss_type="grpo"),
    "dr_grpo with an empty completion": dict(loss_type="dr_grpo"),
    "dapo with an empty completion": dict(loss_type="dapo"),
}
PREFERENCE_VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "robust": dict(label_smoothing=0.2),
    "sigmoid_norm": {},
}
CPO_VARIANTS: dict[str, dict[str, Any]] = {
    "cpo": dict(loss_type="sigmoid"),
    "cpo with label smoothing": dict(loss_type="sigmoid", label_smoothing=0.2),  # cDPO's mixture
    "simpo": dict(loss_type="simpo", simpo_gamma=0.5),
}
CUTS: list[dict[str, Any]] = [
    dict(temperature=0.7),
    dict(top_k=5),
    dict(top_p=0.8),
    dict(top_p=0.05),
    dict(min_p=0.1),
    dict(temperature=1.5, top_k=9, top_p=0.85, min_p=0.15),
    dict(temperature=0.5, top_k=9, top_p=0.95, min_p=0.01),
]
BETA = 0.4  # of the preference losses
MISMATCHED = [0.3, -0.2, 0.5, 0.4, 0.1, -0.3, 0.6, 0.2]  # KTO's log-ratios of prompts with others' completions


class Accelerator:
    """One process."""

    num_processes, process_index, device = 1, 0, torch.device("cpu")

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str = "sum") -> Any:
        return x


def stub(**attributes: Any) -> Any:
    """What stands for a trainer in training."""
    common = dict(
        accelerator=Accelerator(),
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        compute_loss_func=None,
        label_smoother=None,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    return types.SimpleNamespace(**{**common, **attributes})


def outputs(log_probs: torch.Tensor, mask: torch.Tensor) -> Any:
    """What the forward pass that TRL patches gives: 0 where nothing is predicted."""
    zeros = torch.zeros_like(log_probs)
    log_probs = torch.where(mask, log_probs, 0.0)
    return types.SimpleNamespace(
        log_probs=log_probs, label_mask=mask, entropy=zeros, is_top1=torch.zeros_like(mask), mean_logits=zeros
    )


def with_gradient(loss: Callable[[torch.Tensor], torch.Tensor], at: np.ndarray) -> dict[str, Any]:
    """The loss and its gradient."""
    x = torch.tensor(at, requires_grad=True)
    value = loss(x)
    value.backward()
    assert x.grad is not None
    return {"loss": value.item(), "gradient": rounded(x.grad.numpy())}


def rounded(x: np.ndarray) -> Any:
    """Nested lists of as many digits as float32 holds."""
    return np.vectorize(lambda v: float(f"{v:.9g}"), otypes=[float])(x).tolist()


def draw(seed: int, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, scale, shape).astype(np.float32)


def mask_of(lengths: list[int], steps: int) -> np.ndarray:
    return np.arange(steps) < np.array(lengths)[:, None]


def grpo() -> dict[str, Any]:
    shape = (len(LENGTHS), MAX_LENGTH)
    log_prob = -np.abs(draw(0, shape, 1.0, 2.0))
    old = log_prob - draw(1, shape, 0.4)  # ratios between about 0.4 and 2.5
    ref = log_prob - draw(2, shape, 0.3)
    advantages = draw(3, shape[:1], 1.0)
    inputs = {"log_prob": log_prob, "old_log_prob": old, "ref_log_prob": ref, "advantages": advantages}
    variants = {}
    for name, options in GRPO_VARIANTS.items():
        lengths = [0 if i == 2 and "empty" in name else length for i, length in enumerate(LENGTHS)]
        mask = mask_of(lengths, MAX_LENGTH)
        with tempfile.TemporaryDirectory() as folder:
            config = GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, max_completion_length=10, steps_per_generation=1, **options
            )

        def loss(x: torch.Tensor, config: GRPOConfig = config, mask: np.ndarray = mask) -> torch.Tensor:
            trainer = stub(
                args=config,
                loss_type=config.loss_type,
                importance_sampling_level=config.importance_sampling_level,
                beta=config.beta,
                epsilon_low=config.epsilon,
                epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
                max_completion_length=config.max_completion_length,
                top_entropy_quantile=config.top_entropy_quantile,
                off_policy_mask_threshold=config.off_policy_mask_threshold,
                use_vllm=False,
                _entropy_bonus_enabled=False,
                _get_per_token_logps_and_entropies=lambda *args, **kwargs: (x, torch.zeros_like(x), None),
            )
            ids = torch.zeros(shape, dtype=torch.long)
            batch = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1] + 1,
                "completion_ids": ids,
                "completion_mask": torch.tensor(mask).long(),
                "old_per_token_logps": torch.tensor(old),
                "ref_per_token_logps": torch.tensor(ref),
                "advantages": torch.tensor(advantages),
                "num_items_in_batch": torch.tensor(mask.sum()),
            }
            return GRPOTrainer._compute_loss(trainer, None, batch)

        variants[name] = {"lengths": lengths, "options": options, **with_gradient(loss, log_prob)}
    return {"max_length": 10, **{key: rounded(x) for key, x in inputs.items()}, "variants": variants}


def sft() -> dict[str, Any]:
    log_prob = -np.abs(draw(4, (len(LENGTHS), MAX_LENGTH), 1.0, 2.0))
    mask = torch.tensor(mask_of(LENGTHS, MAX_LENGTH))

    def loss(x: torch.Tensor) -> torch.Tensor:
        trainer = stub(args=types.SimpleNamespace(loss_type="nll", average_tokens_across_devices=False))
        trainer.accelerator.parallelism_config = None
        batch = {"input_ids": mask.long(), "labels": mask.long(), "attention_mask": mask.long()}
        result = SFTTrainer.compute_loss(trainer, lambda **kwargs: outputs(x, mask), batch)
        assert isinstance(result, torch.Tensor)
        return result

    return {"lengths": LENGTHS, "log_prob": rounded(log_prob), **with_gradient(loss, log_prob)}


def preferences() -> dict[str, Any]:
    """Of pairs: the first half of the rows are the chosen completions, the second half the rejected ones of the same prompts.

    CPO and SimPO are without the likelihood term that TRL adds, and ORPO with a likelihood over the tokens of the chosen ones.
    """
    steps = 5
    pairs = len(LENGTHS) // 2
    lengths = [min(length, steps) for length in LENGTHS]
    mask = mask_of(lengths, steps)
    log_prob = np.where(mask, -np.abs(draw(5, mask.shape, 0.7, 1.0)), 0.0).astype(np.float32)
    ref = np.where(mask, log_prob - draw(6, mask.shape, 0.5), 0.0).astype(np.float32)
    full_mask = torch.tensor(np.concatenate([np.zeros((len(mask), 1), bool), mask], 1))  # with a token of the prompt
    inputs = {"input_ids": full_mask.long(), "attention_mask": torch.ones_like(full_mask), "completion_mask": full_mask.long()}

    def means(x: torch.Tensor) -> torch.Tensor:
        return torch.where(full_mask[:, 1:], x, 0.0).sum(1) / full_mask[:, 1:].sum(1)

    def dpo(name: str, options: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            trainer = stub(
                ld_alpha=None,
                precompute_ref_logps=True,
                f_divergence_type="reverse_kl",
                loss_types=[name],
                loss_weights=[1.0],
                beta=BETA,
                label_smoothing=options.get("label_smoothing", 0.0),
                use_weighting=False,
            )
            sums = torch.tensor(ref.sum(1))
            batch = {**inputs, "ref_chosen_logps": sums[:pairs], "ref_rejected_logps": sums[pairs:]}
            return DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs(x, full_mask[:, 1:]), batch, False)

        return loss

    def cpo(options: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            trainer = stub(beta=BETA, alpha=0.0, **{"label_smoothing": 0.0, "simpo_gamma": 0.0, **options})
            scores = means(x) if options["loss_type"] == "simpo" else torch.where(full_mask[:, 1:], x, 0.0).sum(1)
            return CPOTrainer.cpo_loss(trainer, scores[:pairs], scores[pairs:])[0].mean()

        return loss

    def orpo(x: torch.Tensor) -> torch.Tensor:
        scores = means(x)
        bonus = ORPOTrainer.odds_ratio_loss(stub(beta=BETA), scores[:pairs], scores[pairs:])[0]
        return -x[:pairs][full_mask[:pairs, 1:]].mean() - bonus.mean()

    def kto(x: torch.Tensor) -> torch.Tensor:
        trainer = stub(
            loss_type="kto",
            calculate_KL=True,
            precompute_ref_logps=True,
            beta=BETA,
            desirable_weight=1.0,
            undesirable_weight=1.5,
            _compute_kl_logps=lambda model, batch: torch.tensor(MISMATCHED),
        )
        batch = {
            **inputs,
            "label": torch.arange(2 * pairs) < pairs,
            "ref_logps": torch.tensor(ref.sum(1)),
            "ref_KL_logps": torch.zeros(len(MISMATCHED)),
        }
        return KTOTrainer._compute_loss(trainer, lambda **kwargs: outputs(x, full_mask[:, 1:]), batch, False)

    variants = {name: (options, dpo(name, options)) for name, options in PREFERENCE_VARIANTS.items()}
    variants |= {name: (options, cpo(options)) for name, options in CPO_VARIANTS.items()}
    variants["orpo"] = ({}, orpo)
    variants["kto"] = (dict(undesirable_weight=1.5, log_ratios_of_mismatched_pairs=MISMATCHED), kto)
    return {
        "lengths": lengths,
        "beta": BETA,
        "log_prob": rounded(log_prob),
        "ref_log_prob": rounded(ref),
        "variants": {name: {"options": o, **with_gradient(loss, log_prob)} for name, (o, loss) in variants.items()},
    }


def tiny_trainer(folder: str, **options: Any) -> GRPOTrainer:
    """A `GRPOTrainer` whose rewards are those of `REWARDS`, in the order of the rows."""
    words = ["<pad>", "<eos>", *"abcdef"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(**sizes)),
        reward_funcs=lambda completions, **kwargs: [reward for group in REWARDS for reward in group],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=2,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c d", "e f", "a f"]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        ),
    )


def advantages() -> dict[str, Any]:
    result: dict[str, Any] = {"rewards": REWARDS}
    for scale in ("group", "batch", "none"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = tiny_trainer(folder, scale_rewards=scale)
            trainer.model.train()
            rows = [{"prompt": prompt} for prompt in ("a b", "c d", "e f", "a f") for _ in range(4)]
            batch = trainer._generate_and_score_completions(rows)
            assert isinstance(batch["advantages"], torch.Tensor)
            result[scale] = rounded(batch["advantages"].numpy().reshape(4, 4))
    return result


def overlong() -> dict[str, Any]:
    lengths = list(range(0, 14))
    penalty = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    return {"lengths": lengths, "max_length": 10, "cache": 4, "penalty": penalty([[0] * n for n in lengths])}


def cuts() -> dict[str, Any]:
    """Which tokens transformers leaves of some logits, and their probabilities."""
    logits = draw(7, (6, 23), 2.0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=23, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    variants = []
    for options in CUTS:
        model.generation_config = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
        config, _ = model._prepare_generation_config(None)
        processors = model._get_logits_processor(config, input_ids_seq_length=1)
        scores = processors(torch.zeros((len(logits), 1), dtype=torch.long), torch.tensor(logits))
        variants.append({"options": options, "probabilities": rounded(torch.softmax(scores, -1).numpy())})
    return {"logits": rounded(logits), "variants": variants}


def main() -> None:
    golden = {
        "versions": {name: metadata.version(name) for name in ("trl", "transformers", "torch")},
        "grpo": grpo(),
        "sft": sft(),
        "preferences": preferences(),
        "advantages": advantages(),
        "overlong": overlong(),
        "cuts": cuts(),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
