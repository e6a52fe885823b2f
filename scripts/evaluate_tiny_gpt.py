"""Print the loss of `tiny-gpt` and its checkpoints on both corpora, next to uniform and unigram losses.

    python scripts/evaluate_tiny_gpt.py

On `python-stdlib` every twentieth file is read. Under the Python that it was trained with (training.json
names it) these are the files held out; under another one most of their text was seen in training.
"""

import json
import platform
from importlib.resources import files as resources

import torch

import curvescope as cs
from curvescope.data.baselines import uniform_loss, unigram_loss
from curvescope.data.corpora import corpus_text, stdlib_files
from curvescope.data.text import windows
from curvescope.models.zoo import REVISIONS


def main() -> None:
    tokenizer = cs.load("tiny-gpt").tokenizer
    files = stdlib_files()
    seen = [path for i, path in enumerate(files) if i % 20]
    train = [token for path in seen[::10] for token in tokenizer.encode(path.read_text(encoding="utf-8"))]
    facts = json.loads(
        (resources("curvescope") / "assets/tiny-gpt/training.json").read_text(encoding="utf-8")
    )
    version = platform.python_version()
    held = "held out" if f"Python {version}," in facts["corpus"] else "mostly seen"
    texts = {
        "sample": corpus_text("sample"),
        f"stdlib {version}, {held}": "\n".join(p.read_text(encoding="utf-8") for p in files[::20])[:400_000],
    }
    print(f"{'corpus':<32}{'uniform':>9}{'unigram':>9}" + "".join(f"{r:>9}" for r in REVISIONS))
    for name, text in texts.items():
        ids = tokenizer.encode(text)
        numbers = [uniform_loss(tokenizer.vocab_size), unigram_loss(train, ids, tokenizer.vocab_size)]
        pairs = windows(torch.tensor(ids), tokens=(len(ids) - 1) // 128 * 128, seq_len=128)
        batches = cs.Batches.from_tensors(*pairs, batch_size=64)
        numbers += [cs.Problem(cs.load("tiny-gpt", revision=r), batches).loss_value() for r in REVISIONS]
        print(f"{name:<32}" + "".join(f"{x:9.3f}" for x in numbers))


if __name__ == "__main__":
    main()
