"""Small Hugging Face models, saved to a folder."""

from importlib.resources import files

import torch

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "of", "is", "and", "block", "matrix"]


def save_bert(folder, head: str):
    """A folder with a fresh BERT under that head, and a tokenizer of a dozen words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **TINY)
    getattr(transformers, head)(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return str(folder)


def save_family(folder, family: str):
    """A folder with a fresh model of gpt2, llama or bert, three layers, and the bundled tokenizer."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    if family != "gpt2":
        sizes |= {"intermediate_size": 24, "max_position_embeddings": 64}
    if family == "llama":
        sizes |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
    more = {"n_positions": 64} if family == "gpt2" else {}
    config = transformers.CONFIG_MAPPING[family](**sizes, **more, vocab_size=520, pad_token_id=0)
    kind = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder):
    """The bundled tokenizer of 512 tokens, beside a model."""
    import transformers

    tokenizer = str(files("curvescope") / "assets" / "tiny-gpt" / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer).save_pretrained(folder)
    return str(folder)
