"""rules_python's module of this name, over Bazel 4's own provider."""

# buildifier: disable=native-py
PyInfo = PyInfo
