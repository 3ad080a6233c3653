"""Packaging: metadata, extras and the two console scripts."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="nfdt",
    version="0.1.0",
    description="Unmodified Keras 3 scripts, trained on a cluster: asynchronous parameter server and Horovod allreduce",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["nfdt", "nfdt.*", "hfdt", "hfdt.*"]), "nfdt_client"],
    package_dir={"nfdt_client": "client/nfdt_client"},
    package_data={"nfdt": ["py.typed", "planning/data/*.json"], "hfdt": ["py.typed"], "nfdt_client": ["py.typed"]},
    install_requires=[
        "click>=8.1",
        "cloudpickle>=3.0",
        "grpcio>=1.75.1",
        "grpcio-health-checking>=1.75.1",
        "keras>=3.14",
        "numpy>=1.26",
        "protobuf>=6.31.1,<8",
        "psutil>=5.9",
        "pydantic>=2.8",
        "safetensors>=0.4",
    ],
    extras_require={
        "tensorflow": ["tensorflow>=2.20"],
        "cpu": ["tensorflow-cpu>=2.20"],
        "horovod": ["mpi4py>=4.0"],  # Horovod itself does not compile as pip gets it: ./scripts/install-horovod
        "plots": ["matplotlib>=3.8"],
        "dev": [
            "cryptography>=42",
            "grpc-stubs",
            "hypothesis>=6.100",
            "mypy>=1.11",
            "pandas>=2.2",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "scikit-learn>=1.5",
            "tensorboard>=2.18",
            "types-protobuf",
            "types-psutil",
        ],
        "examples": ["scikit-learn>=1.5"],
        "mutation": ["mutmut>=3.8,<4"],
    },
    entry_points={"console_scripts": ["nfdt=nfdt.cli:main", "hfdt=nfdt.cli:hfdt_main"]},
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
)
