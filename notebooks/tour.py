# %% [markdown]
# # A tour of curvescope
#
# Curvature of a small language model, from loading it to a map of its blocks. Results, models, problems and
# operators have a display: a cell that ends in one shows its numbers, a table and a figure.

# %%
import curvescope as cs

model = cs.load("tiny-gpt")
model

# %% [markdown]
# A model, data and a loss make a *problem*. Its variables are all parameters; the table groups them by
# role.

# %%
problem = cs.Problem(model, cs.text_data("sample", model, tokens=64, seq_len=32))
print(f"loss {problem.loss_value():.3f}")
problem

# %% [markdown]
# A problem has curvature *operators*, which are matrices given by their products with vectors. Blocks are
# chosen by globs: here the attention of the first layer.

# %%
ATTENTION = "L0.W_[QKVO]"
H = cs.Hessian(problem, ATTENTION)
H

# %% [markdown]
# ## Extreme eigenvalues
# These are both ends of the spectrum. The error of each eigenvalue is at most its residual.

# %%
ends = cs.eigsh(H, k=2, which="BE", tol=1e-2, vectors=False)
ends

# %% [markdown]
# ## The whole spectrum
# This density is estimated from two random probes. The band is the 95 % interval over probes.

# %%
rho = cs.spectral_density(H, num_probes=2, num_steps=12)
rho

# %% [markdown]
# ## Where the curvature is
# Traces of all blocks from the same probes, then the root mean square entry of every pair of blocks.

# %%
cs.block_traces(cs.GGN(problem, ATTENTION), num_probes=6)

# %%
cs.block_norms(H, num_probes=2)

# %% [markdown]
# ## Two parts
# H = H_o + H_f. The first has no negative eigenvalues, the second has both signs.

# %%
for operator in (H, cs.GGN(problem, ATTENTION), cs.FunctionalHessian(problem, ATTENTION)):
    found = cs.trace(operator, num_probes=6)
    print(f"{type(operator).__name__:10} trace {found.value:8.1f} ± {found.stderr:.1f}")

# %% [markdown]
# These results have `.to_frame()`, `.plot(ax)` and `.save(folder)`. From here: `curvescope report` makes a
# page of all of this, `curvescope list` names the studies, and the other notebooks look at four papers.
