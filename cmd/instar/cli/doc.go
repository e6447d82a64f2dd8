// SPDX-License-Identifier: Apache-2.0

// Package cli is the command instar as a function of its surroundings.
//
// [Main] takes an [Env] (arguments, output, terminal, clock, pin folder) and
// returns the exit code; it reads no global state and can run many times in one
// process. Commands that read are nouns and know --json, whose output has a
// "version" at its top level; commands that change are verbs, and a change that
// was made already succeeds and says so. An error is one line on the standard
// error, "instar: what: why"; the codes are in exit.go and in
// "instar help exit-codes".
package cli
