"""`run -k EXPR` chooses cases as pytest's own -k chooses tests by name."""

import pytest
from _pytest.mark.expression import Expression

from distbench.spec import UserError
from distbench.spec.job import CaseChoice, none_chosen

IDS = ("step/f32/tp_mlp/a=True", "step/f32/tp_mlp/a=False", "collective/bf16/all_gather/tp", "Android/notes")


@pytest.mark.parametrize(
    "text",
    [
        *("tp_mlp", "TP_MLP", "not tp_mlp", "step and True", "step or gather", "not step and not gather"),
        *("step and (True or False)", "not (step or bf16)", "True or not f32 and tp", "not not step", "android"),
    ],
)
def test_an_expression_means_what_pytest_makes_of_it(text: str) -> None:
    theirs = Expression.compile(text)
    for case_id in IDS:
        expected = theirs.evaluate(lambda name, **_: name.lower() in case_id.lower())  # noqa: B023 (called at once)
        assert CaseChoice(text).matches(case_id) == expected, case_id


def test_a_quoted_part_may_hold_what_else_has_a_meaning() -> None:
    case_id = "redistribute/f32[64,64]/S(0)R->RS(0)/greedy"
    assert CaseChoice("'S(0)R->' and greedy").matches(case_id) and CaseChoice("'and'").matches("random")
    assert not CaseChoice('"S(1)"').matches(case_id) and CaseChoice("f32[64,64]").matches(case_id)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("", "a part of a case's id is missing"), ("a and", "a part of a case's id is missing")),
        *(("(a", "a parenthesis is not closed"), ("a)", "')' is not expected here")),
        *(
            ("a b", "'b' is not expected here"),
            ("a and S(0)->R", "put a part that has parentheses in quotes"),
            ("'a", "a quote is not closed"),
            ("()", "a part of a case's id"),
        ),
        *(("(" * 3000 + "a" + ")" * 3000, "nested deeper than 50 levels"), ("not " * 3000 + "a", "nested deeper than")),
    ],
)
def test_what_is_no_expression_is_a_sentence(text: str, why: str) -> None:
    with pytest.raises(UserError, match=r"^-k ") as refused:
        CaseChoice(text)
    assert why in str(refused.value) and "such as -k" in str(refused.value)


def test_a_choice_of_nothing_names_a_few_ids() -> None:
    sentence = none_chosen("x", 40, [f"step/{number}" for number in range(40)])
    assert "matches 0 of 40 cases" in sentence and "step/2;" in sentence and "step/3" not in sentence
