"""Deltic on a Ray cluster, which needs deltic[ray]: applications of Ray Serve, and files of `deltic run`."""
