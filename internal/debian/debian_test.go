// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

func TestParseTargets(t *testing.T) {
	for _, tc := range []struct {
		name, lines string
		want        mirror
	}{
		{"both", "bookworm http://mirror.example/debian/\nbookworm-security http://mirror.example/security/\n",
			mirror{"http://mirror.example/debian/", "http://mirror.example/security/"}},
		{"the first of each", "bookworm http://a.example/debian/\nbookworm-updates http://b.example/debian/\nstable-security http://c.example/s/\nx-security http://d.example/s/\n",
			mirror{"http://a.example/debian/", "http://c.example/s/"}},
		{"no security", "trixie https://mirror.example/pub/debian/\n",
			mirror{"https://mirror.example/pub/debian/", "https://mirror.example/pub/debian-security/"}},
		{"no folder", "trixie https://mirror.example/\n",
			mirror{"https://mirror.example/", "https://mirror.example/debian-security/"}},
	} {
		got, err := parseTargets(tc.lines)
		if err != nil || got != tc.want {
			t.Errorf("%s: %v, %v; want %v", tc.name, got, err, tc.want)
		}
	}
	for _, lines := range []string{"", "\n", "x-security http://mirror.example/security/\n"} {
		if got, err := parseTargets(lines); err == nil || !strings.Contains(err.Error(), "sources.list.d") {
			t.Errorf("%q: %v, %v; want an error that says what to do", lines, got, err)
		}
	}
}

func TestSources(t *testing.T) {
	m := mirror{"http://mirror.example/debian/", "http://mirror.example/security/"}
	for suite, want := range map[Suite]string{
		"trixie":           "http://mirror.example/debian/ trixie main\n",
		"trixie-backports": "http://mirror.example/debian/ trixie-backports main\n",
		"trixie-security":  "http://mirror.example/security/ trixie-security main\n",
	} {
		if got := m.sources(suite); !strings.HasPrefix(got, "deb ") || !strings.HasSuffix(got, want) {
			t.Errorf("%s: %q, want it to end with %q", suite, got, want)
		}
	}
}

func newStore(t *testing.T) *Store {
	t.Helper()
	t.Setenv(StoreEnv, filepath.Join(t.TempDir(), "store"))
	s, err := OpenStore(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Many make the same folder, of which one stays, complete.
func TestMakeOnce(t *testing.T) {
	s := newStore(t)
	var made atomic.Int32
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			path, err := s.Make("a/b", func(dir string) error {
				made.Add(1)
				return os.WriteFile(filepath.Join(dir, "file"), []byte("text"), 0o600)
			})
			if err != nil {
				t.Error(err)
			}
			if text, err := os.ReadFile(filepath.Join(path, "file")); err != nil || string(text) != "text" {
				t.Errorf("%q, %v", text, err)
			}
		})
	}
	all.Wait()
	if made.Load() != 1 || !s.Has("a/b") {
		t.Errorf("it was made %d times", made.Load())
	}
}

// What fails leaves nothing, and what was left by a killed process is in nobody's way.
func TestMakeFails(t *testing.T) {
	s := newStore(t)
	wrong := errors.New("wrong")
	_, err := s.Make("a", func(dir string) error {
		return errors.Join(os.WriteFile(filepath.Join(dir, "half"), nil, 0o600), wrong)
	})
	if !errors.Is(err, wrong) || s.Has("a") {
		t.Errorf("%v; it is there: %t", err, s.Has("a"))
	}
	if err := os.MkdirAll(s.Path("a.new")+"/old", 0o755); err != nil {
		t.Fatal(err)
	}
	path, err := s.Make("a", func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(path); err != nil || len(left) > 0 {
		t.Errorf("it has %v, %v", left, err)
	}
}

func TestStoreFolder(t *testing.T) {
	home := t.TempDir()
	t.Setenv(StoreEnv, "")
	t.Setenv("XDG_CACHE_HOME", home)
	s, err := OpenStore(io.Discard)
	if err != nil || s.Path("x") != filepath.Join(home, "instar-vmtest", "x") {
		t.Errorf("%v, %v", s, err)
	}
	t.Setenv(StoreEnv, "/proc/nothing")
	if _, err := OpenStore(io.Discard); err == nil || !strings.Contains(err.Error(), StoreEnv) {
		t.Errorf("%v, want an error that names %s", err, StoreEnv)
	}
}
