# %% [markdown]
# # Cracking the Hessian
#
# Slides of Singh, Ormaniec and Hofmann (2025) ask how far the GGN stands for the Hessian of a Transformer.
# Here the two of them before and after training; `curvescope reproduce singh2025` checks every statement.

# %%
import pandas as pd

import curvescope as cs
from curvescope.papers import PAPERS

print(PAPERS["singh2025"].citation)

# %% [markdown]
# ## The largest eigenvalue before and after training
# Of the queries and keys of the first layer, on the same text. Residuals bound the error of each eigenvalue.

# %%
BLOCKS = "L0.W_[QK]"
rows, problems = [], {}
for revision in ("initial", None):
    model = cs.load("tiny-gpt", revision=revision)
    problems[revision] = cs.Problem(model, cs.text_data("sample", model, tokens=64, seq_len=32))
    row = {"checkpoint": revision or "final", "loss": problems[revision].loss_value()}
    for kind in (cs.Hessian, cs.GGN):
        top = cs.eigsh(kind(problems[revision], BLOCKS), k=1, tol=1e-2, vectors=False)
        row |= {f"λ_max {kind.__name__}": top.values[0], f"residual {kind.__name__}": top.residuals[0]}
    rows.append(row)
pd.DataFrame(rows)

# %% [markdown]
# ## What the GGN leaves out
# The functional Hessian H − H_o of the trained model: its eigenvalues have both signs.

# %%
cs.spectral_density(cs.FunctionalHessian(problems[None], BLOCKS), num_probes=2, num_steps=10)
