# %% [markdown]
# # Traveling Words
#
# Molina (2023) describes a language model as tokens that travel on a sphere. This notebook shows the
# embedding and the layer norms of the bundled model. `curvescope reproduce molina2023` makes every figure,
# for any language model.

# %%
from curvescope.papers import PAPERS, figures_of, find_figure

print(PAPERS["molina2023"].citation)
for name, words in figures_of("molina2023").items():
    print(f"{name:12} {words}")

# %% [markdown]
# ## The embedding beside its normalized form

# %%
embeddings = find_figure("molina2023", "embeddings")
embeddings.run(embeddings.Config.from_dict({"model": "tiny-gpt"}))

# %% [markdown]
# ## The ellipsoids of the layer norms, and keys out of reach

# %%
layernorm = find_figure("molina2023", "layernorm")
layernorm.run(layernorm.Config.from_dict({"model": "tiny-gpt"}))
