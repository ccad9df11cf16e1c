"""The one small model that every lesson trains, and the text it is trained on."""

from pdt.model.data import TextData, english_text, synthetic_tokens
from pdt.model.gpt import GPT, GPTConfig

PRESETS = {
    "tiny": GPTConfig(),  # 0.25 M parameters, for tests
    "small": GPTConfig(block_size=128, num_layers=4, num_heads=8, hidden_size=192),  # 1.9 M
}

__all__ = ["GPT", "PRESETS", "GPTConfig", "TextData", "english_text", "synthetic_tokens"]
