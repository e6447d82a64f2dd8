// SPDX-License-Identifier: Apache-2.0

package testutil

import "testing"

// UnlessShort is how much a test does: n, or less with -short, which is for processors
// that are emulated.
func UnlessShort(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// Slow skips, with -short, a test that takes minutes on a processor that is emulated and
// does nothing there that no other test does.
func Slow(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("too slow for -short")
	}
}
