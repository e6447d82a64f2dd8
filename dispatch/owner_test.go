// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/testutil"
)

// The owner of a group's folder may put there what he likes. Prepare runs as root at
// each start of his server, and gives him nothing that was not his.
func TestPrepareFollowsNoLink(t *testing.T) {
	testutil.NeedRoot(t)
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	w.must(prepare(o, 65534))
	file := filepath.Join(t.TempDir(), "file")
	w.must(os.WriteFile(file, nil, 0o600))
	other := w.options("127.0.0.1:4434")
	g := w.open(other)
	pin := filepath.Join(g.Path(), "control")
	for what, link := range map[string]func(name string) error{
		"symbolic": func(name string) error { return os.Symlink(file, name) },
		"hard":     func(name string) error { return os.Link(pin, name) },
	} {
		name := filepath.Join(w.path(o), "z-link")
		w.must(link(name))
		err := prepare(o, 65534)
		if what == "hard" && (err == nil || !strings.Contains(err.Error(), name)) {
			t.Errorf("Prepare with a %s link: %v", what, err)
		}
		for _, path := range []string{file, pin} {
			var st unix.Stat_t
			w.must(unix.Stat(path, &st))
			if st.Uid != 0 {
				t.Errorf("with a %s link, Prepare gave %s away", what, path)
			}
		}
		w.must(os.Remove(name))
	}
	w.must(prepare(o, 65534))
	checkOwner(t, "in the end", w.path(o), 65534)
}

// What else is in the folder of a forgotten group is forgotten with it: otherwise no
// group could be made beside it any more.
func TestForgetOfAFolderWithFolders(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	w.must(os.MkdirAll(filepath.Join(g.Path(), "a", "b"), 0o700))
	w.must(dispatch.Forget(g.Path()))
	w.open(w.options("127.0.0.1:4434"))
	if names := list(t, filepath.Dir(g.Path())); len(names) != 1 {
		t.Errorf("left are %q", names)
	}
}
