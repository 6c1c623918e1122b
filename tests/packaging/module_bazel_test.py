# SPDX-License-Identifier: Apache-2.0
"""Evaluates the Bazel 7 build's declarations, which Bazel 4 does not read.

MODULE.bazel, the module extension behind it and WORKSPACE run in a Starlark
interpreter, with Bazel's functions replaced by ones that take notes.
"""

import pathlib
import re

import starlark
from absl.testing import absltest

ROOT = pathlib.Path(__file__).absolute().parents[2]

# Bazel's functions that take or return functions, which cannot be Python's.
_PRELUDE = """
attr = struct(
    bool = _ignore,
    label = _ignore,
    label_keyed_string_dict = _ignore,
    label_list = _ignore,
    string = _ignore,
    string_dict = _ignore,
    string_list = _ignore,
)

native = struct(local_repository = _local_repository)

def repository_rule(implementation, **kwargs):
    def rule(name, **attributes):
        _repository(name)

    return rule

def module_extension(implementation):
    implementation(None)
"""


class Build:
  """What evaluated files declared."""

  def __init__(self):
    self.repositories: list[str] = []
    self.local_repositories: list[str] = []
    self.modules: list[tuple[str, str]] = []
    self.deps: dict[str, str] = {}
    self.used_extensions: list[tuple[str, str]] = []
    self.used_repositories: list[str] = []
    self.toolchains: list[str] = []
    self.workspaces: list[str] = []
    self._dialect = starlark.Dialect.extended()
    self._globals = starlark.Globals.extended_by(
      [starlark.LibraryExtension.StructType]
    )

  def evaluate(self, path: str) -> starlark.Module:
    """Evaluates a file of the tree, and what it loads."""
    module = starlark.Module()
    for name, function in self._functions().items():
      module.add_callable(name, function)
    self._run(module, "prelude.bzl", _PRELUDE)
    self._run(module, path, (ROOT / path).read_text())
    return module

  def _run(self, module: starlark.Module, name: str, source: str) -> None:
    tree = starlark.parse(name, source, self._dialect)
    loader = starlark.FileLoader(self._load)
    starlark.eval(module, tree, self._globals, loader)

  def _load(self, label: str) -> starlark.FrozenModule:
    return self.evaluate(
      label.removeprefix("//").replace(":", "/").lstrip("/")
    ).freeze()

  def _functions(self):
    def ignore(*args, **kwargs):
      return None

    def use_extension(file, name):
      self.used_extensions.append((file, name))
      return name

    return {
      "Label": ignore,
      "_ignore": ignore,
      "_repository": self.repositories.append,
      "_local_repository": lambda name, path: self.local_repositories.append(
        name
      ),
      "bazel_dep": lambda name, version: self.deps.update({name: version}),
      "module": lambda name, version: self.modules.append((name, version)),
      "register_toolchains": lambda *labels: self.toolchains.extend(labels),
      "use_extension": use_extension,
      "use_repo": lambda _, *names: self.used_repositories.extend(names),
      "workspace": lambda name: self.workspaces.append(name),
    }


class ModuleBazelTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.module = Build()
    cls.module.evaluate("MODULE.bazel")
    cls.workspace = Build()
    cls.workspace.evaluate("WORKSPACE")

  def test_name_and_version_are_the_wheels(self):
    version = re.search(
      r'^VERSION = "(.*)"$', (ROOT / "version.bzl").read_text(), re.MULTILINE
    )[1]
    self.assertEqual(self.module.modules, [("aiter_jax", version)])
    self.assertEqual(self.workspace.workspaces, ["aiter_jax"])

  def test_same_repositories_as_workspace(self):
    self.assertNotEmpty(self.workspace.repositories)
    self.assertCountEqual(
      self.module.used_repositories, self.workspace.repositories
    )

  def test_extension_declares_them(self):
    self.assertEqual(
      self.module.used_extensions,
      [("//third_party:extensions.bzl", "repositories")],
    )
    extension = Build()
    extension.evaluate("third_party/extensions.bzl")
    self.assertCountEqual(extension.repositories, self.module.used_repositories)

  def test_rule_sets_are_those_of_bazel_4(self):
    # Java and coverage are Bazel's own business there.
    self.assertContainsSubset(
      set(self.workspace.local_repositories)
      - {"rules_java", "remote_coverage_tools"},
      self.module.deps,
    )
    for name, version in self.module.deps.items():
      self.assertRegex(version, r"^\d+\.\d+\.\d+", name)

  def test_same_toolchains(self):
    self.assertEqual(self.module.toolchains, self.workspace.toolchains)

  def test_bazel_7_ignores_workspace(self):
    self.assertEmpty((ROOT / "WORKSPACE.bzlmod").read_text())
    self.assertRegex((ROOT / ".bazelversion").read_text(), r"^7\.\d+\.\d+\n$")


if __name__ == "__main__":
  absltest.main()
