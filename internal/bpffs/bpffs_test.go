// SPDX-License-Identifier: Apache-2.0

package bpffs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

func TestIsBPFFS(t *testing.T) {
	if got, err := IsBPFFS(t.TempDir()); err != nil || got {
		t.Errorf("a folder of another file system: %t, %v", got, err)
	}
	if _, err := IsBPFFS(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
	root := testutil.BPFFS(t)
	below := filepath.Join(root, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{root, below} {
		if got, err := IsBPFFS(dir); err != nil || !got {
			t.Errorf("%s: %t, %v", dir, got, err)
		}
	}
}

func TestEscape(t *testing.T) {
	for _, tc := range []struct{ s, name string }{
		{"", ""},
		{"plain-name_1", "plain-name_1"},
		{"udp-192.0.2.1-443-eth0.100", "udp-192%2e0%2e2%2e1-443-eth0%2e100"},
		{"[2001:db8::1]", "[2001:db8::1]"},
		{"100%", "100%25"},
		{"a/b", "a%2fb"},
		{".", "%2e"},
		{"..", "%2e%2e"},
		{"%2e", "%252e"},
		{"\x00\n\x7f", "%00%0a%7f"},
		{"größe\xff", "größe\xff"},
	} {
		if got := Escape(tc.s); got != tc.name {
			t.Errorf("Escape(%q) = %q, want %q", tc.s, got, tc.name)
		}
		if got, err := Unescape(tc.name); err != nil || got != tc.s {
			t.Errorf("Unescape(%q) = %q, %v; want %q", tc.name, got, err, tc.s)
		}
	}
	for _, name := range []string{".", "a.b", "a/b", "%", "%2", "a%", "%2E", "%41", "%zz", "%2", "%%25", "\n", "%2x"} {
		if got, err := Unescape(name); err == nil {
			t.Errorf("Unescape(%q) = %q, want an error", name, got)
		}
	}
}

// Whatever Escape makes is a name on a bpffs, one for each string.
func TestEscapedNamesWork(t *testing.T) {
	root := testutil.BPFFS(t)
	if err := os.Mkdir(filepath.Join(root, "a.b"), 0o700); err == nil {
		t.Error("a bpffs takes a name with a dot: Escape is not needed")
	}
	all := make([]byte, 0, 256)
	for c := range 256 {
		all = append(all, byte(c))
	}
	names := []string{".", "..", "...", "a.b", "%2e", "/", string(all[:64]), string(all[64:])}
	for _, s := range names {
		if err := os.Mkdir(filepath.Join(root, Escape(s)), 0o700); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOfN(rapid.Byte(), 1, 80).Draw(t, "s"))
		dir := filepath.Join(root, Escape("rapid "+s))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzEscape(f *testing.F) {
	f.Add("eth0.100", "%2e")
	f.Fuzz(func(t *testing.T, s, name string) {
		escaped := Escape(s)
		if strings.ContainsAny(escaped, "./\x00") {
			t.Errorf("Escape(%q) = %q", s, escaped)
		}
		if back, err := Unescape(escaped); err != nil || back != s {
			t.Errorf("Unescape(Escape(%q)) = %q, %v", s, back, err)
		}
		// One name for each string: what Unescape takes, Escape makes.
		if back, err := Unescape(name); err == nil && Escape(back) != name {
			t.Errorf("Unescape(%q) = %q, whose name is %q", name, back, Escape(back))
		}
	})
}

func TestRenameNoReplace(t *testing.T) {
	for _, tc := range []struct {
		name string
		root func(testing.TB) string
	}{
		{"bpffs", testutil.BPFFS},
		{"another file system", func(t testing.TB) string { return t.TempDir() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := tc.root(t)
			path := func(name string) string { return filepath.Join(root, name) }
			for _, name := range []string{"new", "taken", "new/inside"} {
				if err := os.Mkdir(path(name), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			err := RenameNoReplace(path("new"), path("taken"))
			if !errors.Is(err, fs.ErrExist) {
				t.Errorf("to a name that is taken: %v", err)
			}
			if !strings.Contains(err.Error(), path("taken")) {
				t.Errorf("%q does not name %q", err, path("taken"))
			}
			if err := RenameNoReplace(path("none"), path("free")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("of nothing: %v", err)
			}
			var before, after unix.Stat_t
			if err := unix.Stat(path("new"), &before); err != nil {
				t.Fatal(err)
			}
			if err := RenameNoReplace(path("new"), path("free")); err != nil {
				t.Fatal(err)
			}
			if err := unix.Stat(path("free"), &after); err != nil || after.Ino != before.Ino {
				t.Errorf("after it inode %d, want %d (%v)", after.Ino, before.Ino, err)
			}
			if _, err := os.Stat(path("free/inside")); err != nil {
				t.Errorf("content: %v", err)
			}
			if _, err := os.Stat(path("new")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the old name: %v", err)
			}
		})
	}
}
