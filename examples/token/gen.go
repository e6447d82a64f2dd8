// SPDX-License-Identifier: Apache-2.0

package main

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel token token.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
