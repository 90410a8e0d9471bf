"""The code interpreter: an HTTP server in the guest that runs code in Jupyter kernels."""
