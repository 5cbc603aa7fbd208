"""Build chains of tours, every document of which may be edited before it is signed: section "Tours" of the page."""

from collections.abc import Callable
from dataclasses import dataclass, field

from generator.parts.case import base64_text, canonical, draw, sha256
from generator.parts.drafts import FILE, OTHER_FILE
from generator.parts.envelopes import Envelope, envelope, written
from generator.parts.pairs import OWNER, Pair, pair

HOLDERS = {"hospital-1": pair("holder 1"), "Hospital_2.b": pair("holder 2")}
ORDER = ["hospital-1", "Hospital_2.b"]
CODE = sha256(b"code")
START = [3, sha256(b"model 3")]

Payload = dict[str, object]


@dataclass(slots=True)
class Tour:
    """Say how a chain differs from the usual one.

    Documents are named `plan`, `delegation.0`, `consent.0`, `receipt.0` and so on by their visits, and `completion`.
    """

    visits: int = 2
    complete: bool = False
    owner: Pair = OWNER
    order: list[str] = field(default_factory=lambda: list(ORDER))
    changes: dict[str, Payload] = field(default_factory=dict)
    """Other members, before anything that depends on them is made."""
    texts: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    """Edits of the payload, before it is signed."""
    signers: dict[str, Pair] = field(default_factory=dict)
    envelopes: dict[str, Callable[[Envelope], bytes]] = field(default_factory=dict)
    """Edits of the envelope, after it was signed."""
    payloads: dict[str, bytes] = field(default_factory=dict)
    """The bytes that were signed, once they are made."""

    def lines(self) -> list[bytes]:
        """Return the lines of the chain."""
        lines = [self.document("plan", self.plan(), self.owner)]
        self.payloads["head"] = self.payloads["plan"]
        model = self.member("plan", "start", START)
        for visit in range(self.visits):
            lines.append(self.receipt(visit, model))
            model = self.member(f"receipt.{visit}", "after", after(visit))
            self.payloads["head"] = self.payloads[f"receipt.{visit}"]
        if self.complete:
            lines.append(self.document("completion", self.completion(model), self.owner))
        return lines

    def written(self) -> bytes:
        """Return the chain."""
        return b"".join(self.lines())

    def result(self) -> Payload:
        """Return what a reader reads."""
        self.lines()
        last = after(self.visits - 1) if self.visits else START
        model = (
            self.member(f"receipt.{self.visits - 1}", "after", last)
            if self.visits
            else self.member("plan", "start", last)
        )
        return {"visits": self.visits, "head": self.digest("head"), "model": model, "complete": self.complete}

    def member(self, document: str, name: str, usual: object) -> object:
        """Return a member of a document, which may have been changed."""
        return self.changes.get(document, {}).get(name, usual)

    def digest(self, document: str) -> str:
        """Return the digest of a document."""
        return sha256(self.payloads[document])

    def document(self, name: str, payload: Payload, signer: Pair) -> bytes:
        """Sign a document and return its line."""
        kind = name.partition(".")[0]
        data = canonical(payload | self.changes.get(name, {}))
        data = self.texts.get(name, bytes)(data)
        self.payloads[name] = data
        made = envelope(f"tour.{kind}", data, self.signers.get(name, signer))
        return self.envelopes.get(name, written)(made)

    def plan(self) -> Payload:
        """Return the payload of the plan."""
        made: Payload = {"format": 1, "tour": draw("tour", 16).hex(), "lineage": draw("lineage", 16).hex()}
        made |= {"start": START, "holders": {name: one.line for name, one in HOLDERS.items()}, "order": self.order}
        made |= {"seconds": 3600, "attempts": 3, "code": CODE}
        return made | {"issued": "2026-11-01T00:00:00Z", "expires": "2027-01-31T00:00:00Z"}

    def receipt(self, visit: int, before: object) -> bytes:
        """Return the line of a visit's receipt, with delegation and consent in it."""
        signer = pair(f"visit {visit}")
        previous = self.digest("plan" if visit == 0 else f"receipt.{visit - 1}")
        delegation: Payload = {"format": 1, "plan": self.digest("plan"), "visit": visit, "attempt": 1}
        delegation |= {"previous": previous, "before": before, "signer": signer.line}
        delegation |= {"key": draw(f"key id {visit}", 16).hex(), "salt": draw(f"salt {visit}", 32).hex()}
        delegation |= {"expires": "2026-12-01T02:00:00Z"}
        delegated = self.document(f"delegation.{visit}", delegation, self.owner)
        consent: Payload = {"format": 1, "delegation": self.digest(f"delegation.{visit}"), "policy": sha256(b"policy")}
        consent |= {"offer": sha256(b"offer"), "files": [FILE, OTHER_FILE]}
        consent |= {"issued": "2026-12-01T00:30:00Z", "expires": "2026-12-01T01:30:00Z"}
        holder = HOLDERS[self.order[visit % len(self.order)]]
        consented = self.document(f"consent.{visit}", consent, holder)
        receipt: Payload = {"format": 1, "delegation": base64_text(delegated), "consent": base64_text(consented)}
        receipt |= {"code": CODE, "after": after(visit), "files": [OTHER_FILE, FILE, OTHER_FILE]}
        receipt |= {"chunks": 12, "scrubbed": 1 << 30}
        receipt |= {"started": "2026-12-01T00:40:00Z", "ended": "2026-12-01T01:00:00Z"}
        return self.document(f"receipt.{visit}", receipt, signer)

    def completion(self, model: object) -> Payload:
        """Return the payload of the completion."""
        made: Payload = {"format": 1, "plan": self.digest("plan"), "head": self.digest("head"), "visits": self.visits}
        return made | {"model": model, "issued": "2026-12-02T00:00:00Z"}


def after(visit: int) -> list[object]:
    """Return the model that a visit makes."""
    return [4 + visit, sha256(b"model %d" % (4 + visit))]
