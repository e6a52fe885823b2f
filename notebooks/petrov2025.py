# %% [markdown]
# # Closing the Curvature Gap
#
# The paper (arXiv 2510.16927, 2025) bounds norms of the Hessian of a Transformer's block. This notebook
# compares the bounds with true norms on small instances. `curvescope reproduce petrov2025` makes the
# paper's figures.

# %%
from curvescope.papers import PAPERS, figures_of
from curvescope.studies import find

print(PAPERS["petrov2025"].citation)
for name, words in figures_of("petrov2025").items():
    print(f"{name:12} {words}")

# %% [markdown]
# `violated 1 of 10` says that the true norm is above the bound in one of ten instances.

# %%
bounds = find("bounds")
settings = {
    "num_seeds": 1,
    "weight_scales": [0.1, 1.0],
    "data_scales": [1.0, 3.0],
    "query_scales": [1.0, 1000.0],
    "output_scales": [0.0],
    "depths": [1],
    "num_layers": [1, 2],
    "num_tokens": 4,
    "width": 3,
    "head_size": 2,
    "hidden": 3,
}
result = bounds.run(bounds.Config.from_dict(settings))
result

# %%
tables = result.tables()
print(", ".join(tables))
next(iter(tables.values())).head(10)
