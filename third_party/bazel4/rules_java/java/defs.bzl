# SPDX-License-Identifier: Apache-2.0
"""What Bazel 4's own files load from rules_java."""

# buildifier: disable=native-java
java_binary = native.java_binary

# buildifier: disable=native-java
java_import = native.java_import

# buildifier: disable=native-java
java_library = native.java_library
java_package_configuration = native.java_package_configuration
java_plugin = native.java_plugin
java_proto_library = native.java_proto_library
java_runtime = native.java_runtime

# buildifier: disable=native-java
java_test = native.java_test
java_toolchain = native.java_toolchain
