import pytest

pytest.register_assert_rewrite("tests.native.payload", "tests.native.toys", "tests.native.traced")
