"""Verdicts as JUnit XML: a suite for each scenario, a case for each check; an invalid run is an error."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from loadtest.verdict import Outcome, Verdict


def junit_xml(verdicts: Sequence[Verdict]) -> bytes:
    """The XML document. The checks of an invalid run are skipped: they say nothing."""
    suites = ElementTree.Element("testsuites", name="loadtest")
    for verdict in verdicts:
        is_invalid = verdict.outcome is Outcome.INVALID
        failed = [] if is_invalid else [check for check in verdict.checks if not check.holds]
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name=f"loadtest.{verdict.scenario}",
            tests=str(1 + len(verdict.checks)),
            errors=str(int(is_invalid)),
            failures=str(len(failed)),
            skipped=str(len(verdict.checks) if is_invalid else 0),
        )
        validity = _case(suite, verdict.scenario, "the run is valid")
        if is_invalid:
            ElementTree.SubElement(validity, "error", message="; ".join(verdict.faults), type="invalid")
        for check in verdict.checks:
            case = _case(suite, verdict.scenario, check.name)
            if is_invalid:
                ElementTree.SubElement(case, "skipped", message="the run is invalid")
            elif not check.holds:
                ElementTree.SubElement(case, "failure", message=str(check), type="limit")
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))


def _case(suite: ElementTree.Element, scenario: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"loadtest.{scenario}", name=name)
