"""A tokenizer with the special tokens of an encoder."""

from curvescope.tokenizers import ByteTokenizer

MASK, FIRST, LAST, PAD = 259, 257, 258, 256


class Encoder(ByteTokenizer):
    """Bytes with the special tokens of an encoder."""

    mask_id, cls_id, sep_id, pad_id = MASK, FIRST, LAST, PAD
