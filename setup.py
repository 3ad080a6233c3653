"""Packaging: metadata, extras and the two console scripts."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = "0.1.0"
# Of the repository, as in https://HOST/OWNER/nfdt; named when a release is built, see CONTRIBUTING.md.
URL = os.environ.get("NFDT_URL", "").rstrip("/")
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?![a-z]+:)[^)]*)\)")


def describe() -> str:
    """Return the README for package indexes, where paths of the repository lead nowhere."""

    def replaced(link: re.Match[str]) -> str:
        if not URL:
            return "" if link["picture"] else link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({URL}/{kind}/v{VERSION}/{link['path']})"

    return _LINK.sub(replaced, Path(__file__).with_name("README.md").read_text(encoding="utf-8"))


# What a client does without that only submits jobs to a server elsewhere; see nfdt/core/host/packages.py.
SERVER = ["cryptography>=50", "grpcio-health-checking>=1.75.1", "numba>=0.62", "psutil>=5.9"]
# The page of a server for browsers, and /metrics.
UI = ["prometheus-client>=0.21", "starlette>=1.3.1", "uvicorn>=0.30"]
# What the page needs to show the use of GPUs.
GPUS = ["nvidia-ml-py>=12.535"]
TENSORBOARD = ["tensorboard>=2.18"]
PLOTS = ["matplotlib>=3.8"]
# What a script's own machine needs for the tutorial and the examples, besides a backend of Keras.
WHOLE = [*SERVER, *UI, *TENSORBOARD, *PLOTS, "scikit-learn>=1.5"]
# The documentation as a site: scripts/docs.
DOCS = ["latex2mathml>=3.77", "mkdocs-click>=0.9", "mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"]

setup(
    name="nfdt",
    version=VERSION,
    description="Unmodified Keras 3 scripts, trained on a cluster: asynchronous parameter server and Horovod allreduce",
    long_description=describe(),
    long_description_content_type="text/markdown",
    author="The NFDT authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="keras tensorflow distributed-training parameter-server horovod asynchronous-sgd",
    platforms=["Linux"],
    python_requires=">=3.11,<3.14",  # TensorFlow has no release for 3.14
    project_urls={
        name: f"{URL}/{path}"
        for name, path in (("Documentation", "tree/main/docs"), ("Changelog", "blob/main/CHANGELOG.md"), ("Source", ""))
        if URL
    },
    packages=[*find_packages(include=["nfdt", "nfdt.*", "hfdt", "hfdt.*"]), "nfdt_client"],
    package_dir={"nfdt_client": "client/nfdt_client"},
    package_data={
        "nfdt": ["py.typed", "planning/data/*.json", "web/static/*"],
        "hfdt": ["py.typed"],
        "nfdt_client": ["py.typed"],
    },
    install_requires=[
        "click>=8.1",
        "cloudpickle>=3.0",
        "grpcio>=1.75.1",
        "keras>=3.14",
        "numpy>=1.26",
        "protobuf>=6.33.5,<8",
        "pydantic>=2.8",
        "pyyaml>=6.0",
        "rich>=13.7",
        "safetensors>=0.4",
    ],
    extras_require={
        "client": ["tensorflow-cpu>=2.20"],
        "server": SERVER,
        "tensorflow": [*WHOLE, *GPUS, "tensorflow[and-cuda]>=2.20"],
        "cpu": [*WHOLE, "tensorflow-cpu>=2.20"],
        "jax": [*WHOLE, "tensorflow-cpu>=2.20", "jax>=0.10"],  # shards run on TensorFlow
        "jax-cuda": [*WHOLE, *GPUS, "tensorflow-cpu>=2.20", "jax[cuda12]>=0.10"],
        "torch": [*WHOLE, *GPUS, "tensorflow-cpu>=2.20", "torch>=2.14"],  # for CPUs alone: docs/installation.md
        "horovod": ["mpi4py>=4.0"],  # Horovod itself does not compile as pip gets it: ./scripts/install-horovod
        "ui": UI,
        "tensorboard": TENSORBOARD,
        "docs": DOCS,
        "plots": PLOTS,
        "ray": ["ray[default]>=2.54"],
        "dev": [
            *WHOLE,
            *DOCS,
            *GPUS,
            "grpc-stubs",
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "jax>=0.10",
            *("keras-rs>=0.4", "absl-py>=2.0", "regex>=2024.11"),  # KerasHub itself: see scripts/setup
            "kubernetes-validate>=1.30",
            "mypy>=1.11",
            "nbclient>=0.10",
            "pandas>=2.2",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ray>=2.54",
            "ruff>=0.6",
            "selenium>=4.20",
            "setuptools>=78.1.1",  # scripts/audit judges that of the environment, which Python brings in an old version
            "types-protobuf",
            "types-psutil",
            "types-pyyaml",
        ],
        "examples": [
            "wandb>=0.19",
            *("alembic>=1.13", "mlflow-skinny>=3.0", "sqlalchemy>=2.0"),  # MLflow in a file
        ],
        "mutation": ["mutmut>=3.8,<4"],
    },
    entry_points={"console_scripts": ["nfdt=nfdt.cli:main", "hfdt=nfdt.cli:hfdt_main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
