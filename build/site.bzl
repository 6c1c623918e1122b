# SPDX-License-Identifier: Apache-2.0
"""Wheels, installed: what tests, examples and benchmarks import."""

load("@rules_python//python:py_info.bzl", "PyInfo")
load("@rules_python//python:py_test.bzl", "py_test")

# Platforms that have a PJRT plugin to install beside ours.
GPUS = [
    "cuda",
    "rocm",
]

def _gpu_impl(ctx):
    if ctx.build_setting_value not in GPUS + ["none"]:
        fail("%s: %s is none of %s, none" %
             (ctx.label, ctx.build_setting_value, ", ".join(GPUS)))
    return []

gpu = rule(
    implementation = _gpu_impl,
    build_setting = config.string(flag = True),
)

def _site_impl(ctx):
    # A folder, but declared as a file: a sandbox links it as one, where it would
    # link each of a declared folder's ten thousand files, and remove them again,
    # for every test.
    site = ctx.actions.declare_file(ctx.label.name)
    args = ctx.actions.args()
    args.use_param_file("@%s")
    args.set_param_file_format("multiline")
    args.add(site.path)
    args.add_all(ctx.files.wheels)
    ctx.actions.run(
        executable = ctx.executable._install,
        arguments = [args],
        # Quicker unpacked again than half a gigabyte is cached.
        execution_requirements = {"no-cache": ""},
        inputs = ctx.files.wheels,
        mnemonic = "InstallWheels",
        outputs = [site],
        progress_message = "Installing wheels for %s" % ctx.label,
    )
    return [
        DefaultInfo(
            files = depset([site]),
            runfiles = ctx.runfiles(files = [site]),
        ),
        PyInfo(
            imports = depset(["/".join([
                part
                for part in [ctx.workspace_name, ctx.label.package, ctx.label.name]
                if part
            ])]),
            transitive_sources = depset(),
        ),
    ]

site = rule(
    implementation = _site_impl,
    doc = "A folder with the wheels unpacked as pip does it.",
    attrs = {
        "wheels": attr.label_list(allow_files = [".whl"], mandatory = True),
        "_install": attr.label(
            cfg = "exec",
            default = "//build:install_wheels",
            executable = True,
        ),
    },
)

def jax_py_test(name, srcs = None, deps = [], env = {}, site = "//tests:site", **kwargs):
    """A py_test that imports jax and our operators from installed wheels.

    Args:
      name: the test, and its source without the suffix.
      srcs: the test's source; name.py unless given.
      deps: libraries of test code. jax, numpy and such are in the site.
      env: environment variables.
      site: the wheels.
      **kwargs: as for py_test.
    """
    py_test(
        name = name,
        srcs = srcs or [name + ".py"],
        main = (srcs or [name + ".py"])[0],
        env = dict({"PYTHONNOUSERSITE": "1"}, **env),
        deps = deps + [site],
        **kwargs
    )

def sim_py_test(name, arch, devices = 1, env = {}, site = "//tests:sim_site", tags = [], **kwargs):
    """A jax_py_test on simulated AMD GPUs.

    Args:
      name: the test.
      arch: gfx90a, gfx942 or gfx950.
      devices: how many, up to 8.
      env: environment variables.
      site: wheels with the simulator among them.
      tags: as for py_test.
      **kwargs: as for jax_py_test.
    """
    jax_py_test(
        name = name,
        env = dict({
            "AMDGPU_SIM_ARCH": arch,
            "AMDGPU_SIM_DEVICES": str(devices),
            "JAX_PLATFORMS": "rocm",
        }, **env),
        site = site,
        tags = tags + ["sim"],
        **kwargs
    )
