# SPDX-License-Identifier: Apache-2.0
"""Facts and files of the machine: sizes as people write them, files for this user alone."""
