// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"instar/dispatch"
)

// TestFolderThatAnotherUserCouldSwap: who owns a folder above the group could put another group,
// with secrets of his own, in its place.
func TestFolderThatAnotherUserCouldSwap(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	namespace := filepath.Dir(g.Path())
	o.Address = "127.0.0.1:4434"
	for _, folder := range []string{w.root, namespace} {
		if err := os.Chown(folder, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		_, err := dispatch.Open(o)
		if !errors.Is(err, dispatch.ErrPermission) || !strings.Contains(err.Error(), "uid 65534") ||
			!strings.Contains(err.Error(), "chown root:root "+folder) {
			t.Errorf("folder %s of uid 65534: %v", folder, err)
		}
		if err := os.Chown(folder, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	w.open(o)
}

func TestListPassesOverWhatIsNoGroup(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	for _, other := range []string{w.root + "/x/y", filepath.Dir(g.Path()) + "/other"} {
		if err := os.MkdirAll(other, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	list, err := dispatch.List(w.root)
	if err != nil || len(list) != 1 || list[0].Path != g.Path() {
		t.Errorf("List: %+v, %v", list, err)
	}
}

// TestListNeedsBPFFS: a root that is not there yet is empty only where a group could be made.
func TestListNeedsBPFFS(t *testing.T) {
	w := newWorld(t)
	if list, err := dispatch.List(w.root); err != nil || len(list) > 0 {
		t.Errorf("List without a group: %+v, %v", list, err)
	}
	other := t.TempDir()
	for root, mount := range map[string]string{other: other, other + "/instar": other + "/instar", other + "/x/instar": other + "/x/instar"} {
		_, err := dispatch.List(root)
		wantRefused(t, root, err, "no-bpffs", "list groups: no bpffs: "+root+" is not on a bpffs; mount one with: mount -t bpf bpf "+mount)
	}
}

// What is suggested hides nothing.
func TestMountPoint(t *testing.T) {
	for root, want := range map[string]string{
		dispatch.DefaultRoot: "/sys/fs/bpf", "/sys/fs/bpf": "/sys/fs/bpf", "/sys/fs/bpf/": "/sys/fs/bpf", "/sys/fs/bpf/a/b": "/sys/fs/bpf",
		"/instar": "/instar", "/var/lib/instar": "/var/lib/instar", "/sys/fs/bpf-none": "/sys/fs/bpf-none",
	} {
		if got := dispatch.MountPointFor(root); got != want {
			t.Errorf("for %s: %s, want %s", root, got, want)
		}
	}
}
