# SPDX-License-Identifier: Apache-2.0
"""Wheels from PyPI, pinned by hash.

`pypi` fetches what one lock file names. For each project it has a file target
`<name>.whl`, whose link keeps one label for every version, and a filegroup
`<name>` of the wheel under its own name; `wheels` is all of them.
`wheel_archive` unpacks one wheel under a BUILD file of ours.

pip does the downloading, with the user's own index, proxy and cache settings.
"""

def _python(repository_ctx):
    # The label makes Bazel configure the interpreter first.
    return repository_ctx.read(Label("@local_python//:path.txt")).strip()

def _run(repository_ctx, arguments, what):
    result = repository_ctx.execute(arguments, timeout = 3600, quiet = False)
    if result.return_code:
        fail("%s failed:\n%s%s" % (what, result.stdout, result.stderr))

def _wheel_target(name, wheel):
    return """
filegroup(
    name = "{name}",
    srcs = ["{wheel}"],
)
""".format(name = name, wheel = wheel)

def _pypi_impl(repository_ctx):
    python = _python(repository_ctx)
    for version in repository_ctx.attr.python_versions or [""]:
        command = [python, "-I", "-m", "pip", "download"]
        command += ["--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes"]
        command += ["--requirement", repository_ctx.path(repository_ctx.attr.lock)]
        command += ["--dest", "wheels"]
        if version:
            command += ["--python-version", version]
        _run(repository_ctx, command, "pip download")

    build = "package(default_visibility = [\"//visibility:public\"])\n"
    build += """
exports_files(glob(["*.whl"]))

filegroup(
    name = "wheels",
    srcs = glob(["wheels/*.whl"]),
)
"""
    for wheel in repository_ctx.path("wheels").readdir():
        fields = wheel.basename.split("-")
        name = fields[0].lower().replace(".", "_")

        # With several Python versions, a wheel built for one of them says so.
        if repository_ctx.attr.python_versions and fields[2].startswith("cp"):
            name = "%s_%s" % (name, fields[2])
        repository_ctx.symlink(wheel, name + ".whl")
        build += _wheel_target(name, "wheels/" + wheel.basename)
    repository_ctx.file("BUILD.bazel", build)

pypi = repository_rule(
    implementation = _pypi_impl,
    doc = "The wheels that a requirements file with hashes names.",
    attrs = {
        "lock": attr.label(mandatory = True, allow_single_file = True),
        "python_versions": attr.string_list(
            doc = "Fetch each project for all of these, not the building Python alone.",
        ),
    },
)

def _wheel_archive_impl(repository_ctx):
    python = _python(repository_ctx)
    _run(repository_ctx, [
        python,
        "-I",
        repository_ctx.path(Label("//third_party/pypi:unpack_wheel.py")),
        repository_ctx.path(repository_ctx.attr.wheel),
        "--compile" if repository_ctx.attr.compile_python else "--no-compile",
        "--include",
    ] + repository_ctx.attr.include + [
        "--exclude",
    ] + repository_ctx.attr.exclude, "unpacking " + str(repository_ctx.attr.wheel))
    repository_ctx.symlink(repository_ctx.attr.build_file, "BUILD.bazel")

wheel_archive = repository_rule(
    implementation = _wheel_archive_impl,
    doc = "One wheel, unpacked.",
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "compile_python": attr.bool(
            doc = "Write byte code whose content is the same on every machine.",
        ),
        "exclude": attr.string_list(doc = "Path prefixes left out."),
        "include": attr.string_list(doc = "If given, only these path prefixes."),
        "wheel": attr.label(mandatory = True, allow_single_file = True),
    },
)
