"""The option `legacy` of the geometry studies: the choices and text files of the Traveling Words code."""
