# SPDX-License-Identifier: Apache-2.0
"""Our wheels; their bytes depend on their content alone."""

load("//:version.bzl", "JAX_VERSION", "MIN_JAX_VERSION", "PLATFORM_TAG", "PYTHON_REQUIRES", "PYTHON_TAG", "VERSION")

def _wheel_impl(ctx):
    out = ctx.actions.declare_file("%s/%s-%s-%s.whl" % (
        ctx.label.name,
        ctx.attr.distribution,
        ctx.attr.version,
        ctx.attr.tag,
    ))
    args = ctx.actions.args()
    args.use_param_file("@%s")
    args.set_param_file_format("multiline")
    options = [
        ("--out", out.path),
        ("--name", ctx.attr.distribution),
        ("--version", ctx.attr.version),
        ("--tag", ctx.attr.tag),
        ("--summary", ctx.attr.summary),
        ("--requires-python", PYTHON_REQUIRES),
        ("--license", ctx.file._license.path),
        ("--description", ctx.file._description.path),
    ]
    inputs = [ctx.file._license, ctx.file._description]
    if ctx.file.base:
        options.append(("--base", ctx.file.base.path))
        inputs.append(ctx.file.base)
    options += [("--requires", requirement) for requirement in ctx.attr.requires]
    options += [
        ("--extra", "%s=%s" % (name, requirement))
        for name, requirement in ctx.attr.extras.items()
    ]
    options += [
        ("--file", "%s=%s" % (source.short_path, source.path))
        for source in ctx.files.srcs
    ]
    for target, folder in ctx.attr.placed.items():
        for source in target.files.to_list():
            options.append(("--file", "%s/%s=%s" % (folder, source.basename, source.path)))
            inputs.append(source)
    for name, value in options:
        args.add("%s=%s" % (name, value))
    ctx.actions.run(
        executable = ctx.executable._write_wheel,
        arguments = [args],
        inputs = inputs + ctx.files.srcs,
        mnemonic = "WriteWheel",
        outputs = [out],
        progress_message = "Writing wheel " + out.basename,
    )
    return [DefaultInfo(
        files = depset([out]),
        runfiles = ctx.runfiles(files = [out]),
    )]

_wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "base": attr.label(
            allow_single_file = [".whl"],
            doc = "A published wheel to repackage; ours has its content too.",
        ),
        "distribution": attr.string(mandatory = True),
        "extras": attr.string_dict(doc = "Extra -> requirement."),
        "placed": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "Files -> the folder of the wheel they go to.",
        ),
        "requires": attr.string_list(),
        "srcs": attr.label_list(
            allow_files = True,
            doc = "Files that have the same path here and in the wheel.",
        ),
        "summary": attr.string(),
        "tag": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_description": attr.label(
            allow_single_file = True,
            default = "//:README.md",
        ),
        "_license": attr.label(allow_single_file = True, default = "//:LICENSE"),
        "_write_wheel": attr.label(
            cfg = "exec",
            default = "//build:write_wheel",
            executable = True,
        ),
    },
)

def jax_aiter_wheel(name):
    """The pure Python wheel.

    Args:
      name: the target, and the folder that the wheel is in.
    """
    _wheel(
        name = name,
        srcs = [
            "//jax/_src/aiter",
            "//jax/experimental/aiter",
            "//jax_aiter",
            "//jaxlib:gpu_aiter.py",
        ],
        distribution = "jax_aiter",
        extras = {
            "cuda13": "jax-aiter-cuda13==" + VERSION,
            "rocm7": "jax-aiter-rocm7==" + VERSION,
        },
        requires = [
            "jax>=" + MIN_JAX_VERSION,
            "jaxlib>=" + MIN_JAX_VERSION,
            "numpy",
        ],
        summary = "AMD's AITER operators for JAX: fused attention for GPUs",
        tag = "py3-none-any",
        version = VERSION,
    )

def _module(plugin, platform, dist_info, variant = ""):
    return {
        "//jaxlib/%s:%s_aiter.so" % (platform, variant): "jax_%s_plugin" % plugin,
        "//third_party/aiter:report_" + platform: dist_info + ".dist-info/kernels",
    }

def add_on_wheel(name, plugin, platform):
    """`_aiter.so` alone, for who keeps the published plugin.

    Args:
      name: the target, and the folder that the wheel is in.
      plugin: rocm7 or cuda13.
      platform: rocm or cuda.
    """
    distribution = "jax_aiter_" + plugin
    _wheel(
        name = name,
        distribution = distribution,
        placed = _module(plugin, platform, "%s-%s" % (distribution, VERSION)),
        requires = [
            "jax-aiter==" + VERSION,
            "jax-%s-plugin>=%s" % (plugin, MIN_JAX_VERSION),
        ],
        summary = "The GPU kernels of jax-aiter for jax-%s-plugin" % plugin,
        tag = "%s-abi3-%s" % (PYTHON_TAG, PLATFORM_TAG),
        version = VERSION,
    )

def plugin_wheel(name, python_tag, variant = ""):
    """The published ROCm plugin with `_aiter.so` in it.

    Args:
      name: the target, and the folder that the wheel is in.
      python_tag: which of the published wheels, such as cp312.
      variant: the folder of another build of `_aiter.so`, such as "asan/".
    """
    version = "%s+aiter%s" % (JAX_VERSION, VERSION)
    _wheel(
        name = name,
        base = "@pypi_rocm//:jax_rocm7_plugin_%s.whl" % python_tag,
        distribution = "jax_rocm7_plugin",
        placed = _module("rocm7", "rocm", "jax_rocm7_plugin-" + version, variant),
        requires = ["jax-aiter==" + VERSION],
        tag = "%s-%s-%s" % (python_tag, python_tag, PLATFORM_TAG),
        version = version,
    )

def simulator_wheel(name, libraries):
    """The simulator of AMD GPUs, in the place of ROCm's libraries.

    Args:
      name: the target, and the folder that the wheel is in.
      libraries: the shared libraries.
    """
    _wheel(
        name = name,
        distribution = "amdgpu_sim",
        placed = {
            "//tests/amdgpu_sim:plugin": "jax_plugins",
            libraries: "_rocm_sdk_core/lib",
        },
        # The libraries have what this release imports.
        requires = [
            "jax-rocm7-pjrt==" + JAX_VERSION,
            "jax-rocm7-plugin==" + JAX_VERSION,
        ],
        summary = "Simulated AMD Instinct GPUs for JAX on machines without",
        # LLVM's library is the building machine's.
        tag = "py3-none-linux_x86_64",
        version = VERSION,
    )
