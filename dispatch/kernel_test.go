// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/capset"
	"instar/internal/kernel"
	"instar/internal/testutil"
)

// uname26 is UNAME26 of personality(2): to a thread that has it the kernel says to be a
// Linux 2.6.
const uname26 = 0x0020000

// A kernel that is too old is named, with the one that would do.
func TestOldKernel(t *testing.T) {
	testutil.Need(t, capset.BPF, capset.NetAdmin, capset.Perfmon)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	old, _, errno := unix.Syscall(unix.SYS_PERSONALITY, uname26, 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	err := dispatch.ExplainLoad(unix.EINVAL, dispatch.SteeringTCP)
	if _, _, errno := unix.Syscall(unix.SYS_PERSONALITY, old, 0, 0); errno != 0 {
		runtime.LockOSThread() // the thread ends with the goroutine
		t.Fatal(errno)
	}
	wantRefused(t, "load", err, "not-supported", "Linux 2.6 is running", "5.10 is the oldest", "invalid argument")
}

// needUnprivilegedMaps is for tests of servers without capabilities.
func needUnprivilegedMaps(t *testing.T) {
	t.Helper()
	setting, err := os.ReadFile("/proc/sys/kernel/unprivileged_bpf_disabled")
	if err != nil {
		t.Fatal(err)
	}
	if strings.TrimSpace(string(setting)) != "0" {
		testutil.Since(t, kernel.Version{Major: 5, Minor: 19}, "kernel.unprivileged_bpf_disabled is set")
	}
}
