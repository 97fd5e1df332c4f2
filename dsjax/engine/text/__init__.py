"""Text in, text out: tokenizer, prompts, sampling rules, outputs."""
