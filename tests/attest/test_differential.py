"""The same quotes and collateral, judged by another implementation: dcap-qvl, in Rust.

Where the two differ, ours refuses more, and `STRICTER` and `unchecked` say what.
"""

import random
import re
from datetime import UTC, datetime, timedelta

import pytest
import test_tdx
from helpers.foundry import tdx as foundry
from helpers.foundry.authority import NOW, bundle

from fastrack import AttestationError, FormatError, attest

dcap_qvl = pytest.importorskip("dcap_qvl")

REFUSED = "refused"
DAY = timedelta(days=1)
MACHINE = test_tdx.PLATFORM
# What the other library lets pass: it knows its root, and takes that of the chain and all that follows for nothing.
STRICTER = {
    "the PCK certificate has another name",
    "the chain lacks the root",
    "bytes follow the PCK chain",
    "bytes follow the certification data",
    "the outer certification data is of another type",
    "TCB info signed by a platform",
    "QE identity signed by a platform",
    "TCB info signed by a name below an authority",
    "TCB info signed by another name below the root",
    "QE identity signed by another name below the root",
    "TCB info of another type",
    "TCB info for another PCE",
    "no chain for the list",
    "another chain for the list",
}


def ours(quote, given, now, roots):
    try:
        tcb = attest.verify_tdx_quote(quote, attest.TdxCollateral.from_json(given), now=now, roots=roots).tcb
    except (AttestationError, FormatError):
        return REFUSED
    # Ours reports a revoked TCB for a policy to judge.
    return REFUSED if tcb.status == "Revoked" else (str(tcb.status), tcb.advisory_ids)


def theirs(quote, given, now, root=None):
    arguments = (quote, dcap_qvl.QuoteCollateralV3.from_json(given))
    seconds = int(now.timestamp())
    try:
        if root:
            found = dcap_qvl.verify_with_root_ca(*arguments, root, seconds)
        else:
            found = dcap_qvl.verify(*arguments, seconds)
    except ValueError:
        return REFUSED
    return found.status, tuple(sorted(set(found.advisory_ids)))


def both(quote, parts, now=NOW):
    of, given = foundry.intel(), foundry.as_json(parts)
    return ours(quote, given, now, of.roots), theirs(quote, given, now, of.root.der)


@pytest.mark.parametrize("layout", [{}, {"version": 5}, {"version": 5, "body_type": 3}])
def test_good_quotes_are_accepted_by_both(layout):
    one, other = both(foundry.quote(MACHINE, **layout), foundry.collateral())
    assert one == other == ("UpToDate", ())


@pytest.mark.parametrize("days", [-2, -1, 0, 29, 30, 400])
def test_both_agree_on_stale_collateral(days):
    one, other = both(foundry.quote(MACHINE), foundry.collateral(), NOW + days * DAY)
    assert one == other
    assert (one == REFUSED) == (not -1 <= days <= 29)


def test_both_agree_on_every_state_of_the_platform():
    quote = foundry.quote(MACHINE)
    for platform in attest.TcbStatus:
        levels = [foundry.tcb_level(status=platform, advisories=["A"])]
        for part in ("UpToDate", "OutOfDate", "Revoked"):
            module = foundry.module(levels=[foundry.svn_level(3, part, ["B"])])
            for parts in (
                foundry.collateral(info=foundry.tcb_info(levels=levels, modules=[module])),
                foundry.collateral(
                    info=foundry.tcb_info(levels=levels),
                    identity=foundry.qe_identity(levels=[foundry.svn_level(4, part, ["C"])]),
                ),
            ):
                one, other = both(quote, parts)
                assert one == other, (platform, part)


@pytest.mark.slow
def test_both_agree_on_the_search_for_a_level():
    chance = random.Random(7)

    def near(svn):
        return max(0, svn + chance.choice([0, 0, 0, 0, 0, 0, 0, 1, -1]))

    for _ in range(200):
        versions = [
            (tuple(map(near, foundry.COMPONENTS)), tuple(map(near, (5, 3, 2))), near(foundry.PCE_SVN)) for _ in range(5)
        ]
        # Intel's lists are in order, from the highest down; the other library puts them into this order itself.
        levels = [
            foundry.tcb_level(components, pce, tdx, chance.choice(list(attest.TcbStatus)[:-1]), [str(number)])
            for number, (components, tdx, pce) in enumerate(sorted(versions, reverse=True))
        ]
        modules = [foundry.module(levels=[foundry.svn_level(near(5)), foundry.svn_level(near(4), "OutOfDate")])]
        body = foundry.td_report(tee_tcb_svn=bytes([5, chance.choice([0, 3, 3, 4]), 2, *bytes(13)]))
        parts = foundry.collateral(info=foundry.tcb_info(levels=levels, modules=modules))
        one, other = both(foundry.quote(MACHINE, body=body), parts)
        assert one == other


def test_both_agree_on_wrong_quotes_and_collateral():
    given, quote = foundry.collateral(), foundry.quote(MACHINE)
    cases = {name: (data, given) for name, data in test_tdx.wrong_quotes().items()}
    for name, options in test_tdx.wrong_collateral().items():
        parts = foundry.collateral(**options)
        if len(parts["tcb_info_signature"]) == 64 and len(parts["qe_identity_signature"]) == 64:
            cases[name] = (quote, parts)
    for name, case in cases.items():
        one, other = both(*case)
        assert one == REFUSED, name
        assert (other == REFUSED) == (name not in STRICTER), name


@pytest.mark.slow
def test_both_agree_on_a_thousand_altered_quotes():
    chance = random.Random(1)
    quote, given = foundry.quote(MACHINE), foundry.collateral()
    accepted = 0
    for _ in range(1000):
        data = bytearray(quote)
        index = chance.randrange(len(data))
        data[index] ^= 1 << chance.randrange(8)
        one, other = both(bytes(data), given)
        assert one == REFUSED, index
        if other != REFUSED:
            accepted += 1
            assert index in unchecked(quote), index
    assert accepted < 200


def unchecked(quote):
    """Give the bytes that it takes for nothing: the outer type, a size, lines around base64, the root in the chain."""
    chain = quote.index(b"-----BEGIN")
    start = 48 + 584 + 4 + 128
    root = chain + len(bundle(MACHINE.pck, foundry.intel().platform_ca))
    lines = [index for found in re.finditer(rb"\n|\n*-----[^-]+-----\n", quote) for index in range(*found.span())]
    return {start, start + 1, *range(chain - 4, chain), *lines, *range(root, len(quote))}


@pytest.mark.parametrize("day", [datetime(2025, 6, 25, tzinfo=UTC), datetime(2025, 9, 1, tzinfo=UTC)])
def test_both_agree_on_a_real_quote(evidence, day):
    quote = (evidence / "tdx" / "quote_v4.dat").read_bytes()
    given = (evidence / "tdx" / "quote_v4_collateral.json").read_text()
    assert ours(quote, given, day, attest.INTEL_ROOTS) == theirs(quote, given, day)
