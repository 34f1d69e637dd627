# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens a step may verify: budget rules, measured acceptance and measured step costs."""
