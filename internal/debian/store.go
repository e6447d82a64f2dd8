// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// StoreEnv is the variable of the environment that names the folder of the store.
const StoreEnv = "VMTEST_CACHE"

// Store is a folder with what was fetched. It is an error to use the zero value.
type Store struct {
	dir string
	log io.Writer
}

// OpenStore opens the store in the folder that StoreEnv names; by default it is
// instar-vmtest in the user's cache folder. What is being fetched, which takes a while,
// is told to log.
func OpenStore(log io.Writer) (*Store, error) {
	dir := os.Getenv(StoreEnv)
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("find a folder for packages: %w; set %s", err, StoreEnv)
		}
		dir = filepath.Join(cache, "instar-vmtest")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	// Nobody else gets at the set-user-ID programs of old releases.
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make folder for packages: %w; %s names another", err, StoreEnv)
	}
	return &Store{dir: dir, log: log}, nil
}

// Path is where the folder with the key is, or would be.
func (s *Store) Path(key string) string { return filepath.Join(s.dir, key) }

// Has says whether the folder with the key was made.
func (s *Store) Has(key string) bool {
	_, err := os.Stat(s.Path(key))
	return err == nil
}

// Make returns the folder with the key, which may have slashes. Where it is not there
// yet, fill makes its content, in another folder that gets its name at the end. One
// process at a time does that, the others wait.
func (s *Store) Make(key string, fill func(dir string) error) (path string, err error) {
	path = s.Path(key)
	if s.Has(key) {
		return path, nil
	}
	err = s.locked(key, func() error {
		if s.Has(key) {
			return nil
		}
		unfinished := path + ".new"
		if err := os.RemoveAll(unfinished); err != nil { // of somebody who was killed
			return err
		}
		if err := os.Mkdir(unfinished, 0o755); err != nil {
			return err
		}
		if err := fill(unfinished); err != nil {
			return errors.Join(err, os.RemoveAll(unfinished))
		}
		return os.Rename(unfinished, path)
	})
	return path, err
}

// locked runs f while no other process runs one with the same key.
func (s *Store) locked(key string, f func() error) error {
	path := s.Path(key) + ".lock"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return &fs.PathError{Op: "lock", Path: path, Err: err}
		}
	}
	return f()
}
