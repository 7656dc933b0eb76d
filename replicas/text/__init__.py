"""Text to token ids and back, without torch: tokenizer, chat template, incremental detokeniser."""
