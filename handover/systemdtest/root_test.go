// SPDX-License-Identifier: Apache-2.0

package systemdtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"instar/internal/debian"
	"instar/internal/testutil"
)

// suiteEnv is the variable of the environment that names a release of Debian, such as
// trixie, whose systemd is to be tested. By default it is the machine's.
const suiteEnv = "INSTAR_TEST_SYSTEMD"

// rootPackages are what systemd and the tests need, and what that depends on is added.
var rootPackages = []string{"base-files", "base-passwd", "coreutils", "dash", "libc-bin", "mount", "procps", "systemd"}

// rootOf returns the root file system with the systemd to test.
func rootOf(t testing.TB) string {
	t.Helper()
	suite := os.Getenv(suiteEnv)
	if suite == "" {
		if _, err := os.Stat("/lib/systemd/systemd"); err != nil {
			testutil.Skip(t, "needs systemd: install the package systemd: %v", err)
		}
		return "/"
	}
	root, err := fetchRoot(t, debian.Suite(suite))
	if err != nil {
		t.Fatalf("fetch systemd of %s=%s: %v", suiteEnv, suite, err)
	}
	return root
}

// fetching is for tests of this process; others are kept out by the store.
var fetching sync.Mutex

// fetchRoot makes a root file system of packages. Nothing of theirs is executed: what
// their scripts would do is done here, as far as it matters.
func fetchRoot(t testing.TB, suite debian.Suite) (string, error) {
	fetching.Lock()
	defer fetching.Unlock()
	store, err := debian.OpenStore(testLog{t})
	if err != nil {
		return "", err
	}
	return store.Make(filepath.Join("roots", "systemd-"+string(suite)), func(dir string) error {
		if err := store.UnpackAll(t.Context(), suite, dir, rootPackages...); err != nil {
			return err
		}
		for _, name := range []string{"passwd", "group"} {
			text, err := os.ReadFile(filepath.Join(dir, "usr/share/base-passwd", name+".master"))
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, "etc", name), text, 0o644); err != nil { // #nosec G306: everybody's
				return err
			}
		}
		for _, name := range []string{"usr/local/bin", "etc/systemd/system"} {
			if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil { // #nosec G301: everybody's
				return err
			}
		}
		// Without it a system that cannot write there does not start.
		if err := os.WriteFile(filepath.Join(dir, "etc/machine-id"), nil, 0o644); err != nil { // #nosec G306: everybody's
			return err
		}
		if _, err := os.Stat(filepath.Join(dir, "lib/systemd/systemd")); err != nil {
			return errors.Join(fmt.Errorf("its package systemd has no systemd"), err)
		}
		return nil
	})
}

// testLog is a test's log as a writer.
type testLog struct{ testing.TB }

func (l testLog) Write(b []byte) (int, error) {
	l.Log(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}
