"""Commands by subject: options and examples here, the work in the files beside this folder."""
