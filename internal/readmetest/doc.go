// SPDX-License-Identifier: Apache-2.0

// Package readmetest runs the code blocks of README.md. It has nothing but
// tests.
//
// What becomes of a fenced block is said by its language and by the HTML
// comment on the line above it:
//
//	<!-- test: NAME -->            a block of sh is run
//	<!-- not run: REASON -->       a block of any language is left alone
//
// A block of go with neither is a complete program: it has to be formatted and
// to compile in a module that replaces ours by the working tree, the way the
// README tells users to. A block of text is what a command prints. Every other
// block without a comment is an error.
//
// Blocks of sh run with bash -eu -o pipefail as root, in a copy of the working
// tree, with a network namespace, a PID namespace and a bpffs of their own and
// without the network. Blocks of the same name run one after the other in one
// shell, so that the second one finds what the first one left. After the name
// there may be
//
//	timeout=DURATION   for all blocks of the name; default 5m
//	want="REGEXP"      has to match what is printed; may be given repeatedly
package readmetest
