"""``nfdt kubernetes``: the manifests of a cluster on Kubernetes."""

from __future__ import annotations

import re
import secrets
from typing import Any

import click
import yaml

import nfdt
from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_server_packages
from nfdt.core.work.slot_connection import GRACE_S

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
CPU_IMAGE, GPU_IMAGE = f"nfdt:{nfdt.__version__}", f"nfdt:{nfdt.__version__}-gpu"  # as docs/kubernetes.md makes them
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")


class _Dumper(yaml.SafeDumper):
    """Dumper that writes text of several lines as such, and repeats values instead of referring to them."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value in full."""
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
)


def _matching(pattern: re.Pattern[str], expected: str) -> Any:
    def check(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and not pattern.fullmatch(value):
            raise click.BadParameter(f"expected {expected}. Received: {value!r}.")
        return value

    return check


_name = _matching(DNS_LABEL, "lower-case letters, digits and hyphens, a letter first")
_quantity = _matching(QUANTITY, "an amount as Kubernetes writes it, such as 2, 500m or 4Gi")


@click.command()
@click.option("--workers", type=click.IntRange(1), required=True, help="Pods with one worker each.")
@click.option("--max-workers", type=click.IntRange(1), help="Up to so many, as jobs want them: an autoscaler.")
@click.option("--shards", type=click.IntRange(0), default=0, help="Pods with one shard each; 0: in the server's pod.")
@click.option("--image", help=f"Made of deploy/Containerfile; default: {CPU_IMAGE}, with --gpu {GPU_IMAGE}.")
@click.option("--name", default="nfdt", show_default=True, callback=_name, help="Name of the server's Service.")
@click.option("--namespace", default="default", show_default=True, callback=_name)
@click.option("--cpu", default="2", show_default=True, callback=_quantity, help="CPUs of each pod.")
@click.option("--memory", default="4Gi", show_default=True, callback=_quantity, help="Memory of each pod.")
@click.option("--gpu", type=click.IntRange(0), default=0, show_default=True, help="GPUs of each worker.")
@click.option(
    "--grace", type=click.IntRange(0), default=int(GRACE_S), show_default=True, help="Seconds to hand over at the end."
)
@click.option("--storage", callback=_quantity, help="Size of a volume that keeps the server's state.")
@click.option("--allow-code", is_flag=True, help="Take jobs that carry pickled code of their script.")
def kubernetes(image: str | None, **options: Any) -> None:
    """Write the manifests of a job server and its workers, for `kubectl apply -f`.

    They contain new tokens and a new private key: keep the output where only you can read it.
    """
    require_server_packages("nfdt kubernetes")
    if options["max_workers"] is not None and options["max_workers"] < options["workers"]:
        raise UsageError(
            f"--max-workers: expected at least --workers, {options['workers']}. Received: {options['max_workers']}."
        )
    from nfdt.core.wire.certificates import CertificateAuthority
    from nfdt.engines.kubernetes import KubernetesOptions, manifests

    authority = CertificateAuthority(f"nfdt {options['name']}.{options['namespace']}")
    image = _image(image, gpu=options["gpu"])
    chosen = KubernetesOptions(image, **options, token=secrets.token_hex(32), worker_token=secrets.token_hex(32))
    documents = manifests(chosen, authority)
    click.echo(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120), nl=False)


def _image(image: str | None, *, gpu: int) -> str:
    """Return the image of the pods: for GPUs one whose TensorFlow uses them."""
    if gpu and (image or "").rpartition("/")[2] == CPU_IMAGE:
        raise UsageError(
            f"--gpu {gpu}: expected an image with TensorFlow for GPUs. Received: {image}, with one for CPUs. "
            f"Build one with --build-arg EXTRAS=tensorflow under another tag, such as {GPU_IMAGE}."
        )
    return image or (GPU_IMAGE if gpu else CPU_IMAGE)
