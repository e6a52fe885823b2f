# %% [markdown]
# # Cracking the Hessian
#
# The slides of Singh, Ormaniec and Hofmann (2025) ask how well the GGN approximates the Hessian of a
# Transformer. This notebook compares the two before and after training. `curvescope reproduce singh2025`
# checks every statement of the slides.

# %%
import pandas as pd

import curvescope as cs
from curvescope.papers import PAPERS

print(PAPERS["singh2025"].citation)

# %% [markdown]
# ## The largest eigenvalue before and after training
# The blocks are the query and key matrices of the first layer, and the text is the same. A residual bounds
# the error of its eigenvalue.

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
# ## The part that the GGN leaves out
# The functional Hessian H − H_o of the trained model: its eigenvalues have both signs.

# %%
cs.spectral_density(cs.FunctionalHessian(problems[None], BLOCKS), num_probes=2, num_steps=10)
