# %% [markdown]
# # What Does It Mean to Be a Transformer?
#
# Ormaniec, Dangel and Singh (ICLR 2025) ask how norms of Hessian blocks grow with the scale σ of the
# embeddings. Here two of their settings, once; `curvescope reproduce ormaniec2025` makes every figure.

# %%
from curvescope.papers import PAPERS, figures_of, find_figure

print(PAPERS["ormaniec2025"].citation)
for name, words in figures_of("ormaniec2025", more=True).items():
    print(f"{name:12} {words}")

# %% [markdown]
# A linear network of two layers and one layer of linear attention: norms of blocks of the Hessian against σ,
# with the powers that the paper states.

# %%
growth = find_figure("ormaniec2025", "growth")
settings = {"experiments": ["mlp_L2", "linattn_none_mse_log_short_L1"], "repeats": 1, "every": 10}
result = growth.run(growth.Config.from_dict(settings))
result

# %% [markdown]
# What is published next to what was measured here, and the verdict on each.

# %%
for claim in result.claims():
    print(f"{claim.verdict}: published {claim.published}, measured {claim.measured}\n    {claim.claim}")
