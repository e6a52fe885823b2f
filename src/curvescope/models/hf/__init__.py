"""Models of Hugging Face's transformers: from folders and the hub, as modules, with adapters of PEFT."""
