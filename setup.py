"""The one thing that pyproject.toml cannot say yet: the native host link, plain C that is loaded with ctypes.

It is optional. Where there is no C compiler the installation goes on without it, and grammars are driven from Python.
"""

from setuptools import Extension, setup

SOURCES = "sampling/grammar/native"

setup(
    script_name="setup.py",  # the root is the package: what is known as the script is not taken for one of its modules
    ext_modules=[
        Extension(
            "stepgraph.sampling.grammar.native._link",
            sources=[f"{SOURCES}/{name}.c" for name in ("forced", "host_link", "llguidance", "matcher", "pool", "xgrammar")],
            depends=[f"{SOURCES}/{name}.h" for name in ("forced", "host_link", "matcher", "pool")],
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
