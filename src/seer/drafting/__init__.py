# SPDX-License-Identifier: Apache-2.0
"""Grouped drafting: siblings of a prompt group are each other's drafts."""
