"""Pods of Kubernetes manifests as folders and commands of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]


def read_manifests(text: str) -> list[Document]:
    return list(yaml.safe_load_all(text))


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def controllers(documents: Sequence[Document]) -> list[Document]:
    """Return the documents that create pods."""
    return [document for document in documents if "template" in document.get("spec", {})]


def component(document: Document) -> str:
    return document["metadata"]["labels"]["app.kubernetes.io/component"]


@dataclass
class PodFolder:
    """Volumes of one pod as folders, filled from the manifests' secrets.

    Attributes:
        controller: The document that creates the pod.
        documents: All documents.
        root: Folder for the pod's volumes.
    """

    controller: Document
    documents: Sequence[Document]
    root: Path

    @property
    def spec(self) -> Document:
        return self.controller["spec"]["template"]["spec"]

    @property
    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def make_volumes(self) -> None:
        claims = self.controller["spec"].get("volumeClaimTemplates", [])
        for volume in (*self.spec["volumes"], *({"name": claim["metadata"]["name"]} for claim in claims)):
            folder = self.root / volume["name"]
            folder.mkdir(parents=True)
            for name, content in self._contents(volume.get("secret")):
                (folder / name).write_text(content)
                (folder / name).chmod(volume["secret"]["defaultMode"])

    def _contents(self, secret: Document | None) -> Iterator[tuple[str, str]]:
        if secret is not None:
            (found,) = [s for s in of_kind(self.documents, "Secret") if s["metadata"]["name"] == secret["secretName"]]
            assert found["metadata"]["namespace"] == self.controller["metadata"]["namespace"]
            for item in secret["items"]:
                yield item["path"], found["stringData"][item["key"]]

    def command(self, container: Document, words: Sequence[str] | None = None) -> list[str]:
        """Return a command of a container, its own by default, with the folders of this machine for its volumes."""
        paths = {mount["mountPath"]: self.root / mount["name"] for mount in container["volumeMounts"]}
        assert {str(path.name) for path in paths.values()} <= {path.name for path in self.root.iterdir()}
        return [self._local(word, paths) for word in words or container["command"]]

    def _local(self, word: str, paths: dict[str, Path]) -> str:
        inside = [path for path in paths if word == path or word.startswith(f"{path}/")]
        assert inside or not word.startswith("/"), f"{word} is in no volume"
        return word.replace(inside[0], str(paths[inside[0]]), 1) if inside else word
