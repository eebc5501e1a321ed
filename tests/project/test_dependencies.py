"""Dependencies: each pinned version has hashes and a licence that is allowed; the page states what is installed."""

import re
from email import message_from_string as message

from tools.dependencies import LOCKED, PAGE, PERMISSIVE, WEAK, licence, of_version, parts, pins, spdx, table, wanted

PINS = pins()
ROWS = table(PAGE.read_text())
GPL = {"ale-py"}  # in the extra atari only


def test_what_make_setup_installs_has_hashes():
    lines = LOCKED.read_text().replace("\\\n    ", "").splitlines()[1:]
    found = {line.split()[0]: line.split()[1:] for line in lines}
    (extras,) = re.findall(r"^EXTRAS := (.*)$", (LOCKED.parents[1] / "Makefile").read_text(), re.M)
    names = {*wanted(extras.split(",")), "setuptools"} - {"torch"}
    assert {*found} == {f"{name}=={PINS[name]}" for name in names}
    for hashes in found.values():
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
    assert len({one for hashes in found.values() for one in hashes}) == sum(map(len, found.values()))


def test_the_page_lists_every_pinned_package_with_the_licence_that_it_states():
    assert {name: version for name, (version, _, _) in ROWS.items()} == PINS
    stated = {name: found for name in PINS if (found := licence(name))}
    assert {name: ROWS[name][1] for name in stated} == stated
    assert {name for name, (_, _, inner) in ROWS.items() if inner} == wanted() & PINS.keys()


def test_licences_are_permissive_or_of_files_and_atari_is_the_exception():
    unknown = {name: row[1] for name, row in ROWS.items() if not {*parts(row[1])} <= PERMISSIVE | WEAK}
    assert unknown == dict.fromkeys(GPL, "GPL-2.0-only")
    assert all(row[1] for row in ROWS.values())
    assert not any(ROWS[name][2] for name in GPL)  # nothing that pip install pql-rl brings
    assert {"torch", "numpy", "safetensors", "hydra-core", "omegaconf", "rich"} <= {n for n in ROWS if ROWS[n][2]}


def test_names_of_files_and_of_licences():
    assert of_version("numpy-2.1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "numpy", "2.1.0")
    assert of_version("hydra_core-1.3.2.tar.gz", "hydra-core", "1.3.2")
    assert not of_version("numpy-2.1.0rc1-cp311-cp311-win32.whl", "numpy", "2.1.0")
    assert not of_version("numpy-2.1.0.1.tar.gz", "numpy", "2.1.0")
    assert spdx("x", message("Classifier: License :: OSI Approved :: MIT License\nLicense: BSD")) == "MIT"
    assert spdx("x", message("License-Expression: Apache-2.0")) == "Apache-2.0"
    assert spdx("mani-skill", message("Name: mani-skill")) == "Apache-2.0"
    assert parts("Apache-2.0 WITH LLVM-exception OR MIT") == ["Apache-2.0", "LLVM-exception", "MIT"]
