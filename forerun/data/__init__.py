"""Data: prompts and examples in, chat templates, packing into batches, the order of reading."""
