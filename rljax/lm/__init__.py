"""Language models: pretrained weights, tokenizers, and where a small model comes from."""
