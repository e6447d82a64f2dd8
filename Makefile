# SPDX-License-Identifier: Apache-2.0

.PHONY: all generate check lint test race bench demo

all: check lint test

# Compile the eBPF programs and write their Go; needs the pinned clang.
generate:
	scripts/generate

# Generated files and format are as they have to be.
check:
	scripts/generate --check

lint:
	scripts/lint

# As root for all of them; otherwise what needs privileges is skipped.
test:
	scripts/test

race:
	scripts/test -race -shuffle=on

bench:
	scripts/bench

demo:
	go run ./cmd/instar demo
