# %% [markdown]
# # What Does It Mean to Be a Transformer?
#
# Ormaniec, Dangel and Singh (ICLR 2025) compare the Hessian blocks of a Transformer, and ask how their norms
# grow with the scale σ of the embeddings. This notebook goes through the figures of the authors' notebook in
# its order, with one repeat and a few of the scales, so exponents here are right to a few tenths. `curvescope
# reproduce ormaniec2025 --profile full` has all 20 repeats and all scales; its exponents are in
# `benchmarks/results/ormaniec2025-full`.

# %%
from io import BytesIO

import matplotlib.pyplot as plt
from IPython.display import HTML, Image, display

from curvescope.papers import PAPERS, find_figure
from curvescope.papers.ormaniec2025.growth import draw_sweep
from curvescope.viz.notebook import picture


def sweep(*experiments, **settings):
    """Measure norms against σ, and show one figure for each experiment."""
    growth = find_figure("ormaniec2025", "growth")
    chosen = {"experiments": experiments, "repeats": 1, "every": 3, "probes": 2, **settings}
    result = growth.run(growth.Config.from_dict(chosen))
    for name, measured in result.sweeps.items():
        display(HTML(picture(lambda measured=measured: draw_sweep(measured), name)))
    return result


def compare(result):
    """Print every published number next to the measured one."""
    for claim in result.claims():
        print(f"{claim.verdict}: {claim.claim}: published {claim.published}, measured {claim.measured}")


print(PAPERS["ormaniec2025"].citation)

# %% [markdown]
# ## The entries of the Hessian (figure 1, left)
#
# A Transformer of width 16 with one block has 3,836 parameters here. Its exact Hessian is computed column by
# column. The attention part is shown again on the right.

# %%
heatmap = find_figure("ormaniec2025", "heatmap")
entries = heatmap.run(heatmap.Config())
pixels = BytesIO()
entries.figures()["heatmap"].savefig(pixels, format="jpeg", dpi=80)
plt.close("all")
Image(pixels.getvalue(), format="jpeg")

# %%
compare(entries)

# %% [markdown]
# ## Sizes of the entries, with softmax and without (figures 1 and 4)
#
# Entries of the W_Q block are about thirty times smaller than those of the W_V block. Without softmax they
# are about as large.

# %%
histograms = find_figure("ormaniec2025", "histograms")
sizes = histograms.run(histograms.Config())
for name in ("histogram_classical", "histogram_linear"):
    display(HTML(picture(lambda name=name: sizes.figures()[name], name)))
compare(sizes)

# %% [markdown]
# ## Softmax attention of one to five layers
#
# The paper states that norms of the W_Q block grow as σ⁶ (GGN) and σ⁵ (functional Hessian, and the whole),
# those of W_V as σ². Gray lines have these slopes. Dots with bars are the published means of 20 repeats.

# %%
softmax = sweep("softmax_none_ce_log_L*", every=6)

# %%
compare(softmax)

# %% [markdown]
# ## One layer on a linear axis
#
# The same network for σ up to 10, and for σ up to 1. The functional Hessian of W_V is exactly zero.

# %%
_ = sweep("softmax_none_ce_linear_L1", "softmax_none_ce_linear_short_L1")

# %% [markdown]
# ## Pre-norm
#
# The norms are flat for small σ and decay for large σ. The authors fit one exponent through both ranges.

# %%
prenorm = sweep("softmax_pre*", every=6)
compare(prenorm)

# %% [markdown]
# ## Linear attention of one to three layers
#
# Without softmax, skips and feed-forward layers the exponent is 2·3ᴰ for depth D: 6, 18, 54. The functional
# Hessian has 3ᴰ where the target dominates the residual.

# %%
linear = sweep("linattn*")
compare(linear)

# %% [markdown]
# ## Linear networks of one to five layers (figure 8)
#
# Without attention the exponent is 2 at any depth.

# %%
networks = sweep("mlp*")
compare(networks)
