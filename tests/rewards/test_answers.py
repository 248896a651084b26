"""Which answers count as right."""

import pytest
import reasoning_gym

from forerun.rewards.answers import exact_match, last_number, marked_answer, math_answer, number, reasoning_gym_score


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("She has 5 * 2 = 10 apples.\n#### 10", "10", True),
        ("so the total is 1,200 dollars", "1200", True),
        ("The answer is $18 per day.", "18", True),
        ("The answer is: **18**.", "18", True),
        ("The answer is \\(18\\).", "18", True),
        ("<answer> 18 </answer> and 3 more", "18", True),
        ("\\boxed{18} then 7", "18", True),
        ("first \\boxed{7}, no: \\boxed{18}", "18", True),
        ("10-5=5", "5", True),
        ("it is 10-5", "5", True),
        ("it is -5", "-5", True),
        ("it is -5", "5", False),
        ("18.00", "18", True),
        ("#### 18", "so it is 9+9\n#### 18", True),
        ("19 or 18", "18", True),
        ("18 or 19", "18", False),
        ("", "18", False),
        ("I do not know.", "18", False),
        ("\\boxed{\\frac{3}{4}}", "0.75", True),
        ("\\boxed{3/4}", "0.75", True),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("The answer is $x^2+2x$", "x^2+2x+1", False),
        ("Hence $x^2+3$.", "x^2+3", True),
        ("Hence $x^2+3$.", "3", True),
        ("3", "x^2+3", False),
        ("\\boxed{18", "18", True),
    ],
)
def test_math_answers(response, truth, right):
    assert math_answer([], response, truth, {}) == float(right)


def test_extraction():
    assert marked_answer("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert marked_answer("Answer: Paris.") == "Paris"
    assert marked_answer("none here, 5") is None
    assert last_number("1 then 2.5 then .75") == ".75"
    assert last_number("none") is None
    assert number("$1,200.50") == number("1200.5") and number("3/0") is None and number("nan") is None
    assert number("50\\%") == 50 and number("1e400000/1e-400000") is not None


def test_exact_match():
    assert exact_match([], " yes\n", "yes", {}) == 1.0
    assert exact_match([], "yes!", "yes", {}) == 0.0
    assert exact_match([], "4", 4, {}) == exact_match([], '["a", 1]', ["a", 1], {}) == 1.0
    with pytest.raises(ValueError, match="needs a ground truth"):
        exact_match([], "yes", None, {})


@pytest.mark.parametrize("task", ["chain_sum", "number_filtering", "spell_backward", "gsm_symbolic", "coin_flip"])
def test_reasoning_gym_takes_its_own_answers_in_any_wording(task):
    for entry in reasoning_gym.create_dataset(task, seed=3, size=4):
        extra = {"task": task, "entry": entry}
        for text in ("{}", "Let me see: 77.\nThe answer is: {}", "<answer>{}</answer>", "Thinking.\n{}"):
            assert reasoning_gym_score([], text.format(entry["answer"]), None, extra) == 1.0, (text, entry)
        assert reasoning_gym_score([], "<answer>none of it</answer>", None, extra) < 0.5
