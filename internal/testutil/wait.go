// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"fmt"
	"testing"
	"time"
)

// WaitFor calls cond until it is true, and fails the test when that takes
// longer than timeout. The format says what was waited for.
//
// It is for conditions that nothing announces, like a counter in the kernel.
// Where there is a channel or a line to wait for, wait for that.
func WaitFor(t testing.TB, timeout time.Duration, cond func() bool, format string, args ...any) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		if cond() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %v in vain: %s", timeout, fmt.Sprintf(format, args...))
		}
		time.Sleep(pause)
	}
}
